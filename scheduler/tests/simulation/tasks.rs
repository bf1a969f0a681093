//! Definitions by chance.

use serde_json::{Value, json};

use crate::rng::Rng;

/// The number of tasks that a scenario may have.
pub(crate) const TASKS: u64 = 8;

pub(crate) fn task_id(n: u64) -> String {
    format!("t{n}")
}

/// A schedule of some kind that this version has.
fn schedule(rng: &mut Rng) -> Value {
    match rng.between(0, 9) {
        0 | 1 => json!({"cron_expr": "EVERY 1s"}),
        2 => json!({"cron_expr": "EVERY 700ms"}),
        3 => json!({"cron_expr": "EVERY 5s"}),
        4 => json!({"cron_expr": "* * * * *"}),
        5 => json!({"cron_expr": "0/2 * * * * ?"}),
        6 => json!({"cron_expr": "0/10 * * * * ?", "timezone": "Asia/Shanghai"}),
        7 => json!({"cron_expr": "EVERY 20s"}),
        8 => json!({"delay_seconds": rng.between(0, 30)}),
        _ => json!({}),
    }
}

/// A definition of task `n`; with `old`, one that keeps its schedule in half of the cases.
pub(crate) fn definition(rng: &mut Rng, n: u64, old: Option<&Value>) -> Value {
    let mut task = json!({
        "task_id": task_id(n),
        "executor_group": format!("g{}", if rng.permille(700) { n % 2 } else { rng.between(0, 1) }),
        "queue_label": if rng.permille(150) { "urgent" } else { "default" },
        "payload": {"n": n},
        "timeout_ms": *rng.pick(&[500, 900, 3000]),
        "max_retry": *rng.pick(&[0, 0, 1, 2]),
        "retry_backoff": {
            "initial_ms": rng.between(0, 800),
            "multiplier": rng.between(1, 3),
            "max_ms": rng.between(800, 3000),
            "jitter_ms": rng.between(0, 300),
        },
        "priority": rng.between(1, 10),
        "overlap_policy": if rng.permille(650) { "skip" } else { "allow" },
        "misfire_grace_ms": *rng.pick(&[0, 1000, 5000, 60_000]),
        "dedup_window_seconds": *rng.pick(&[0, 5, 60]),
        "description": format!("{}", rng.between(0, 3)),
    });
    let schedule = match old {
        Some(old) if rng.permille(500) => old.clone(),
        _ => schedule(rng),
    };
    for key in ["cron_expr", "timezone", "delay_seconds"] {
        if let Some(value) = schedule.get(key) {
            task[key] = value.clone();
        }
    }
    task
}
