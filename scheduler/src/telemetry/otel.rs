//! The standard variables `OTEL_*`, as far as ax reads them itself.
//!
//! A scheduler must start without its traces: what is wrong here is told once, in the log and by `ax config`, and
//! replaced by the default. `OTEL_EXPORTER_OTLP_HEADERS`, `_TIMEOUT`, `_COMPRESSION`, `_INSECURE` and
//! `OTEL_RESOURCE_ATTRIBUTES` are read by the SDK when the exporter is made.

use std::time::Duration;

use crate::core::trace::Sampler;

/// What is exported, and how. The default exports nothing.
#[derive(Debug, Clone, PartialEq)]
pub struct OtelConfig {
    /// Where traces go; none = nowhere, and no span is built.
    pub endpoint: Option<String>,
    /// Which traces are kept. Defaults to all.
    pub sampler: Sampler,
    /// Whether requests that come with a trace of their own follow its decision. Defaults to true.
    pub parent_based: bool,
    /// Spans that wait to be sent; what does not fit is dropped. Defaults to 4096.
    pub queue: usize,
    /// Spans sent at once. Defaults to 512.
    pub batch: usize,
    /// How long spans are collected before they are sent. Defaults to 1 s.
    pub delay: Duration,
    /// What was not understood, for people.
    pub complaints: Vec<String>,
}

impl Default for OtelConfig {
    fn default() -> Self {
        Self {
            endpoint: None,
            sampler: Sampler::ALWAYS,
            parent_based: true,
            queue: 4096,
            batch: 512,
            delay: Duration::from_secs(1),
            complaints: Vec::new(),
        }
    }
}

impl OtelConfig {
    /// Reads the variables of this process.
    #[must_use]
    pub fn from_env() -> Self {
        Self::new(|name| std::env::var(name).ok())
    }

    /// Reads variables; an empty one counts as not set.
    #[must_use]
    pub fn new(variable: impl Fn(&str) -> Option<String>) -> Self {
        let get = |name: &str| variable(name).map(|v| v.trim().to_owned()).filter(|v| !v.is_empty());
        let mut config = Self::default();
        config.read_sampler(get("OTEL_TRACES_SAMPLER"), get("OTEL_TRACES_SAMPLER_ARG"));
        config.endpoint = config.read_endpoint(&get);
        let mut number = |name: &str, default: u64, most: u64| match get(name) {
            None => default,
            Some(text) => match text.parse() {
                Ok(n) if (1..=most).contains(&n) => n,
                _ => {
                    config.complaints.push(format!("{name}={text}: must be 1 to {most}; taking {default}"));
                    default
                }
            },
        };
        let queue = number("OTEL_BSP_MAX_QUEUE_SIZE", 4096, 1_000_000);
        let batch = number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512, 10_000);
        let delay = number("OTEL_BSP_SCHEDULE_DELAY", 1000, 60_000);
        config.queue = queue as usize;
        config.batch = batch.min(queue) as usize;
        config.delay = Duration::from_millis(delay);
        config
    }

    fn read_endpoint(&mut self, get: &dyn Fn(&str) -> Option<String>) -> Option<String> {
        let specific = |name: &str| {
            get(&format!("OTEL_EXPORTER_OTLP_TRACES_{name}")).or_else(|| get(&format!("OTEL_EXPORTER_OTLP_{name}")))
        };
        let endpoint = specific("ENDPOINT")?;
        if get("OTEL_SDK_DISABLED").is_some_and(|v| v.eq_ignore_ascii_case("true")) {
            return None;
        }
        match get("OTEL_TRACES_EXPORTER").as_deref() {
            None | Some("otlp") => {}
            Some("none") => return None,
            Some(other) => {
                self.complaints.push(format!("OTEL_TRACES_EXPORTER={other}: only otlp and none; no traces"));
                return None;
            }
        }
        if let Some(other) = specific("PROTOCOL").filter(|p| p != "grpc") {
            self.complaints.push(format!("OTEL_EXPORTER_OTLP_PROTOCOL={other}: only grpc; no traces"));
            return None;
        }
        Some(endpoint)
    }

    fn read_sampler(&mut self, name: Option<String>, argument: Option<String>) {
        let Some(name) = name else { return };
        let (parent_based, root) = match name.strip_prefix("parentbased_") {
            Some(root) => (true, root),
            None => (false, name.as_str()),
        };
        let sampler = match root {
            "always_on" => Some(Sampler::ALWAYS),
            "always_off" => Some(Sampler::NEVER),
            "traceidratio" => {
                let text = argument.unwrap_or_else(|| "1".into());
                match text.parse::<f64>() {
                    Ok(share) if (0.0..=1.0).contains(&share) => Some(Sampler::ratio(share)),
                    _ => {
                        self.complaints.push(format!("OTEL_TRACES_SAMPLER_ARG={text}: must be 0 to 1; taking 1"));
                        Some(Sampler::ALWAYS)
                    }
                }
            }
            _ => None,
        };
        match sampler {
            Some(sampler) => (self.sampler, self.parent_based) = (sampler, parent_based),
            None => self.complaints.push(format!(
                "OTEL_TRACES_SAMPLER={name}: must be always_on, always_off or traceidratio, each also with \
                 parentbased_ before it; taking parentbased_always_on"
            )),
        }
    }

    /// The effective values, for people.
    #[must_use]
    pub fn shown(&self) -> String {
        let mut shown = match &self.endpoint {
            None => "off".to_owned(),
            Some(endpoint) => crate::config::without_password(endpoint),
        };
        for complaint in &self.complaints {
            shown.push_str("; ");
            shown.push_str(complaint);
        }
        shown
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> OtelConfig {
        OtelConfig::new(|name| variables.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned()))
    }

    const ENDPOINT: (&str, &str) = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4317");

    #[test]
    fn nothing_is_exported_unless_an_endpoint_is_named_and_nothing_speaks_against_it() {
        assert_eq!(read(&[]), OtelConfig::default());
        assert_eq!(read(&[ENDPOINT]).endpoint.as_deref(), Some("http://collector:4317"));
        let own = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://traces:4317");
        assert_eq!(read(&[ENDPOINT, own]).endpoint.as_deref(), Some("http://traces:4317"));
        for off in [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")] {
            let config = read(&[ENDPOINT, off]);
            assert_eq!((config.endpoint, config.complaints.len()), (None, 0));
        }
        for wrong in [("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"), ("OTEL_TRACES_EXPORTER", "zipkin")] {
            let config = read(&[ENDPOINT, wrong]);
            assert!(config.endpoint.is_none() && config.complaints[0].contains(wrong.1), "{config:?}");
            assert!(config.shown().starts_with("off; OTEL_"), "{}", config.shown());
        }
        assert_eq!(read(&[("OTEL_EXPORTER_OTLP_ENDPOINT", " ")]), OtelConfig::default());
    }

    #[test]
    fn samplers_are_those_of_the_standard() {
        for (name, argument, sampler, parent_based) in [
            ("always_on", "", Sampler::ALWAYS, false),
            ("parentbased_always_off", "", Sampler::NEVER, true),
            ("traceidratio", "0.25", Sampler::ratio(0.25), false),
            ("parentbased_traceidratio", "0", Sampler::NEVER, true),
            ("traceidratio", "", Sampler::ALWAYS, false),
        ] {
            let config = read(&[("OTEL_TRACES_SAMPLER", name), ("OTEL_TRACES_SAMPLER_ARG", argument)]);
            assert_eq!((config.sampler, config.parent_based, config.complaints.len()), (sampler, parent_based, 0));
        }
        for (name, argument) in [("jaeger_remote", "0.1"), ("traceidratio", "2"), ("traceidratio", "NaN")] {
            let config = read(&[("OTEL_TRACES_SAMPLER", name), ("OTEL_TRACES_SAMPLER_ARG", argument)]);
            assert_eq!((config.sampler, config.complaints.len()), (Sampler::ALWAYS, 1));
        }
    }

    #[test]
    fn numbers_out_of_range_are_told_and_replaced() {
        let config = read(&[("OTEL_BSP_MAX_QUEUE_SIZE", "100"), ("OTEL_BSP_SCHEDULE_DELAY", "0")]);
        assert_eq!((config.queue, config.batch, config.delay), (100, 100, Duration::from_secs(1)));
        assert!(config.complaints[0].contains("OTEL_BSP_SCHEDULE_DELAY=0"), "{config:?}");
    }
}
