//! What a handler tells and reads beside its outcome: log lines, progress, results of upstream tasks.

use std::time::Duration;

use anyhow::{Context, Result};
use ax_tests::eventually;
use ax_worker::{Context as Cx, Failure};
use serde_json::{Value, json};

use crate::world::{SOON, Trigger, World};

#[tokio::test]
async fn log_lines_and_progress_are_told_before_the_outcome() -> Result<()> {
    let world = World::new().await?;
    world.consumer(60_000, 0).await?;
    let talking = |_: Value, cx: Cx| async move {
        for percent in 0..=100 {
            cx.progress(f64::from(percent), format!("row {percent}"));
        }
        cx.log("first");
        tokio::time::sleep(Duration::from_millis(1200)).await;
        cx.progress(250.0, "");
        cx.log(format!("long {}", "ä".repeat(100_000)));
        cx.log("last");
        Ok(())
    };
    let worker = world.start(|w| w.handler("work", talking));
    let run = world.publish(Trigger::default()).await?;
    world.settled().await?;
    let events = world.events().await?;
    let kinds: Vec<&str> = events.iter().map(|(kind, ..)| kind.as_str()).collect();
    assert_eq!((kinds.first(), kinds.last()), (Some(&"started"), Some(&"succeeded")));
    let progress: Vec<&(String, String, Value)> = events.iter().filter(|(kind, ..)| kind == "progress").collect();
    // The newest of many counts.
    assert!((2..=5).contains(&progress.len()), "{progress:?}");
    assert_eq!(progress[0].1, format!("{run}:1:progress:1"));
    let told: Vec<&Value> = progress.iter().map(|(_, _, body)| &body["percent"]).collect();
    assert!(
        told.contains(&&json!(100.0)) && progress.iter().any(|(.., body)| body["message"] == "row 100"),
        "{told:?}"
    );
    assert!(progress.last().is_some_and(|(.., body)| body.get("message").is_none() && body["percent"] == 100.0));

    let logs = world.context.get_stream("AX_LOGS").await?;
    let mut lines = Vec::new();
    for seq in 1..=3 {
        let message = eventually(SOON, "a line", || async { Ok(Some(logs.get_raw_message(seq).await?)) }).await?;
        assert_eq!(message.subject.as_str(), format!("ax.log.g.{run}"));
        lines.push(serde_json::from_slice::<Value>(&message.payload)?);
    }
    let text = |line: &Value| line["text"].as_str().map(ToOwned::to_owned).context("no text");
    assert_eq!((text(&lines[0])?, text(&lines[2])?), ("first".into(), "last".into()));
    assert!(lines[0]["at"].is_string() && lines[0]["stream"] == "log", "{}", lines[0]);
    let long = text(&lines[1])?;
    assert!(long.len() < 70_000 && long.ends_with('…'), "{}", long.len());
    worker.stop().await
}

#[tokio::test]
async fn more_lines_than_can_be_told_are_counted_and_hold_up_nobody() -> Result<()> {
    let world = World::new().await?;
    world.consumer(60_000, 0).await?;
    let flooding = |_: Value, cx: Cx| async move {
        for n in 0..20_000 {
            cx.log(format!("line {n}"));
        }
        Ok(())
    };
    let worker = world.start(|w| w.handler("work", flooding));
    world.publish(Trigger::default()).await?;
    world.settled().await?;
    world.until_event("succeeded").await?;
    let mut logs = world.context.get_stream("AX_LOGS").await?;
    let last = logs.info().await?.state.last_sequence;
    let line: Value = serde_json::from_slice(&logs.get_raw_message(last).await?.payload)?;
    let dropped = line["text"].as_str().and_then(|text| text.strip_prefix('(')).and_then(|text| text.split_once(' '));
    let dropped: u64 = dropped.context("the last line counts what was dropped")?.0.parse()?;
    assert_eq!(last - 1 + dropped, 20_000);
    worker.stop().await
}

#[tokio::test]
async fn results_of_upstream_tasks_are_read_as_types_wherever_they_are() -> Result<()> {
    let world = World::new().await?;
    world.consumer(60_000, 0).await?;
    let store = world.context.get_object_store("ax_results").await?;
    let large = serde_json::to_vec(&vec![7_u32; 400_000])?;
    let info = store.put("upstream-run", &mut large.as_slice()).await?;
    let reading = |_: Value, cx: Cx| async move {
        let rows: u64 = cx.upstream("copy.orders").await?;
        let skipped: Option<u64> = cx.upstream("copy.users").await?;
        let large: Vec<u32> = cx.upstream("export").await?;
        let missing = cx.upstream::<u64>("nobody").await.unwrap_err();
        let shape = cx.upstream::<String>("copy.orders").await.unwrap_err();
        let gone = cx.upstream::<String>("gone").await.unwrap_err();
        let retried: Vec<bool> = [&missing, &shape, &gone].map(Failure::is_retried).to_vec();
        let tasks: Vec<String> = cx.upstream_tasks().map(ToOwned::to_owned).collect();
        Ok(json!({"rows": rows, "skipped": skipped, "large": large.len(), "retried": retried, "tasks": tasks}))
    };
    let worker = world.start(|w| w.handler("work", reading));
    let upstream = json!({
        "copy.orders": 48_210, "copy.users": null,
        "export": {"$object": "upstream-run", "size": info.size, "digest": info.digest},
        "gone": {"$object": "nothing", "size": 1, "digest": "SHA-256=x"},
    });
    world.publish(Trigger { upstream, ..Trigger::default() }).await?;
    world.settled().await?;
    let result = world.until_event("succeeded").await?["result"].clone();
    let tasks = json!(["copy.orders", "copy.users", "export", "gone"]);
    let retried = json!([false, false, true]);
    let expected = json!({"rows": 48_210, "skipped": null, "large": 400_000, "retried": retried, "tasks": tasks});
    assert_eq!(result, expected);
    worker.stop().await
}
