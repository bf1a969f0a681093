//! Strict reading of request bodies and query parameters: every field is asked for by name, what was not asked for is
//! unknown, and all broken rules are told at once.

use std::ops::RangeInclusive;

use ax_shared::ids::InvalidName;
use ax_shared::{FieldError, Timestamp};
use serde_json::{Map, Value};

use super::ApiError;

/// The fields of a JSON object or of a query string, under inspection.
#[derive(Debug)]
pub struct Fields {
    object: Map<String, Value>,
    /// Where the object is in the body, e.g. `runs[3]`.
    at: String,
    /// Query parameters: numbers and flags are text.
    textual: bool,
    known: Vec<&'static str>,
    errors: Vec<FieldError>,
}

impl Fields {
    /// The fields of a JSON object that is at path `at` of the body; nothing at all (null) counts as an empty object.
    ///
    /// # Errors
    /// When it is not an object.
    pub fn of_body(body: Value, at: &str) -> Result<Self, FieldError> {
        match body {
            Value::Object(object) => Ok(Self::of_object(object, at)),
            Value::Null => Ok(Self::of_object(Map::new(), at)),
            _ => Err(FieldError::new(at, "type", "must be a JSON object")),
        }
    }

    fn of_object(object: Map<String, Value>, at: &str) -> Self {
        Self { object, at: at.to_owned(), textual: false, known: Vec::new(), errors: Vec::new() }
    }

    /// The parameters of a query string, decoded. A name that occurs several times makes a list.
    #[must_use]
    pub fn of_query(pairs: Vec<(String, String)>) -> Self {
        let mut object = Map::new();
        for (name, value) in pairs {
            let value = Value::String(value);
            match object.get_mut(&name) {
                None => {
                    object.insert(name, value);
                }
                Some(Value::Array(values)) => values.push(value),
                Some(first) => *first = Value::Array(vec![first.take(), value]),
            }
        }
        Self { textual: true, ..Self::of_object(object, "") }
    }

    /// Notes a broken rule of a field.
    pub fn refuse(&mut self, field: &str, rule: &str, message: impl Into<String>) {
        self.errors.push(FieldError::new(field, rule, message).under(&self.at));
    }

    fn take(&mut self, field: &'static str) -> Option<Value> {
        self.known.push(field);
        self.object.remove(field).filter(|value| !value.is_null())
    }

    /// Any JSON; null counts as left out.
    pub fn json(&mut self, field: &'static str) -> Option<Value> {
        self.take(field)
    }

    /// Text of at most `max_chars` characters, without NUL.
    pub fn text(&mut self, field: &'static str, max_chars: usize) -> Option<String> {
        match self.take(field)? {
            Value::String(text) => {
                let chars = text.chars().count();
                if chars > max_chars {
                    self.refuse(field, "size", format!("at most {max_chars} characters, not {chars}"));
                } else if text.contains('\0') {
                    self.refuse(field, "format", "must not contain the NUL character");
                } else {
                    return Some(text);
                }
            }
            Value::Array(_) if self.textual => self.refuse(field, "type", "is given more than once"),
            _ => self.refuse(field, "type", "must be a string"),
        }
        None
    }

    /// Text in the form that `make` checks.
    pub fn parsed<T, E: std::fmt::Display>(
        &mut self,
        field: &'static str,
        make: impl FnOnce(&str) -> Result<T, E>,
    ) -> Option<T> {
        let text = self.text(field, 1024)?;
        match make(&text) {
            Ok(value) => Some(value),
            Err(e) => {
                self.refuse(field, "format", e.to_string());
                None
            }
        }
    }

    /// A name that becomes a token of subjects.
    pub fn name<T>(&mut self, field: &'static str, make: fn(&str) -> Result<T, InvalidName>) -> Option<T> {
        self.parsed(field, make)
    }

    /// An instant in RFC 3339.
    pub fn time(&mut self, field: &'static str) -> Option<Timestamp> {
        self.parsed(field, |text| {
            text.parse::<Timestamp>()
                .map_err(|_| format!("{:?} is not an instant in RFC 3339 like 2026-11-30T02:00:00Z", shortened(text)))
        })
    }

    /// A whole number in a range.
    pub fn integer(&mut self, field: &'static str, range: RangeInclusive<u64>) -> Option<u64> {
        let value = self.take(field)?;
        let number = match &value {
            Value::Number(n) => n
                .as_u64()
                .map(i128::from)
                .or_else(|| n.as_i64().map(i128::from))
                .or_else(|| n.as_f64().filter(|f| f.fract() == 0.0 && f.abs() < 1e30).map(|f| f as i128)),
            Value::String(text) if self.textual => text.parse().ok(),
            _ => None,
        };
        match number.map(u64::try_from) {
            Some(Ok(n)) if range.contains(&n) => return Some(n),
            Some(_) => {
                let shown = shortened(&value.to_string());
                self.refuse(field, "range", format!("{shown} is out of range {} … {}", range.start(), range.end()));
            }
            None => {
                self.refuse(field, "type", format!("must be one whole number, {} … {}", range.start(), range.end()));
            }
        }
        None
    }

    /// True or false; false when left out.
    pub fn flag(&mut self, field: &'static str) -> bool {
        match self.take(field) {
            None => false,
            Some(Value::Bool(flag)) => flag,
            Some(Value::String(text)) if self.textual && ["true", "1", ""].contains(&text.as_str()) => true,
            Some(Value::String(text)) if self.textual && ["false", "0"].contains(&text.as_str()) => false,
            Some(_) => {
                self.refuse(field, "type", "must be true or false");
                false
            }
        }
    }

    /// A list of texts: an array, or a parameter that is repeated.
    pub fn texts(&mut self, field: &'static str) -> Vec<String> {
        let items = match self.take(field) {
            None => return Vec::new(),
            Some(Value::Array(items)) => items,
            Some(one) => vec![one],
        };
        let texts: Vec<String> = items.iter().filter_map(|item| item.as_str()).map(ToOwned::to_owned).collect();
        if texts.len() != items.len() {
            self.refuse(field, "type", "must be strings");
        }
        texts
    }

    /// A field of the contract whose behaviour this version does not have: refused by name unless left out or false.
    pub fn unsupported(&mut self, field: &'static str) {
        let is_default = |value: &Value| *value == Value::Bool(false) || (value == "false");
        if self.take(field).is_some_and(|value| !is_default(&value)) {
            self.refuse(field, "not_supported", "is not supported by this version of ax; leave it out");
        }
    }

    /// The broken rules so far and one for each field that was never asked for.
    #[must_use]
    pub fn into_errors(mut self) -> Vec<FieldError> {
        let unknown: Vec<String> = self.object.keys().cloned().collect();
        let what = if self.textual { "query parameter" } else { "field" };
        let known = if self.known.is_empty() { "none".to_owned() } else { self.known.join(", ") };
        for field in unknown {
            let field = shortened(&field);
            self.refuse(&field, "unknown_field", format!("unknown {what}; known here: {known}"));
        }
        self.errors
    }

    /// Ends the inspection.
    ///
    /// # Errors
    /// Every broken rule.
    pub fn finish(self) -> Result<(), ApiError> {
        let errors = self.into_errors();
        if errors.is_empty() { Ok(()) } else { Err(ApiError::of_fields(errors)) }
    }
}

fn shortened(text: &str) -> String {
    if text.chars().count() > 60 { text.chars().take(60).chain(['…']).collect() } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn query(pairs: &[(&str, &str)]) -> Fields {
        Fields::of_query(pairs.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect())
    }

    #[test]
    fn what_is_not_asked_for_is_unknown() {
        let mut fields = query(&[("limit", "7"), ("colour", "red")]);
        assert_eq!(fields.integer("limit", 1..=500), Some(7));
        let errors = fields.into_errors();
        assert_eq!((errors[0].field.as_str(), errors[0].rule.as_str()), ("colour", "unknown_field"));
        assert!(errors[0].message.contains("limit"));
    }

    #[test]
    fn numbers_are_text_only_in_a_query() {
        let mut fields =
            Fields::of_body(json!({"a": "7", "b": 7, "c": 1.5, "d": -1, "e": 600, "f": 5.0}), "x").unwrap();
        let read = ["a", "b", "c", "d", "e", "f"].map(|name| fields.integer(name, 0..=500));
        assert_eq!(read, [None, Some(7), None, None, None, Some(5)]);
        let told: Vec<_> = fields.into_errors().into_iter().map(|e| (e.field, e.rule)).collect();
        let expected = [("x.a", "type"), ("x.c", "type"), ("x.d", "range"), ("x.e", "range")];
        assert_eq!(told, expected.map(|(a, b)| (a.to_owned(), b.to_owned())));
    }

    #[test]
    fn a_repeated_parameter_is_a_list_or_refused() {
        let mut fields = query(&[("state", "failed"), ("state", "timed_out"), ("limit", "1"), ("limit", "2")]);
        assert_eq!(fields.texts("state"), ["failed", "timed_out"]);
        assert_eq!(fields.integer("limit", 1..=9), None);
        assert_eq!(fields.into_errors()[0].field, "limit");
    }

    #[test]
    fn fields_to_come_are_refused_by_name_unless_at_their_default() {
        let mut fields = Fields::of_body(json!({"force": false, "trigger_time": "2026-01-01T00:00:00Z"}), "").unwrap();
        fields.unsupported("force");
        fields.unsupported("trigger_time");
        let errors = fields.into_errors();
        assert_eq!(errors.len(), 1);
        assert_eq!((errors[0].field.as_str(), errors[0].rule.as_str()), ("trigger_time", "not_supported"));
    }
}
