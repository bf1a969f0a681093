//! When things fire: next, preview, upcoming.

use anyhow::Result;
use serde_json::{Value, json};

use crate::world::{NOW, World, task};

#[tokio::test]
async fn a_preview_needs_no_task() -> Result<()> {
    let world = World::start().await?;
    let body =
        json!({"cron_expr": "0 2 * * *", "timezone": "Asia/Shanghai", "after": "2026-12-01T00:00:00Z", "count": 2});
    let fires = world.post("/preview", body).await?.is(200);
    assert_eq!(fires, json!({"fires": ["2026-12-01T18:00:00.000Z", "2026-12-02T18:00:00.000Z"]}));
    let every = world.post("/preview", json!({"cron_expr": "EVERY 30s"})).await?.is(200);
    assert_eq!(every["fires"][0], json!(NOW.plus_millis(30_000)), "the anchor is `after`, and that is now");
    assert_eq!(every["fires"].as_array().unwrap().len(), 10);
    let ended = world.post("/preview", json!({"cron_expr": "0 0 0 31 12 ? 2026"})).await?.is(200);
    assert_eq!(ended, json!({"fires": ["2026-12-31T00:00:00.000Z"]}));
    for (body, rules) in [
        (json!({}), [("cron_expr", "required")]),
        (json!({"cron_expr": "* * *"}), [("cron_expr", "schedule")]),
        (json!({"cron_expr": "* * * * *", "timezone": "Nowhere"}), [("timezone", "schedule")]),
        (json!({"cron_expr": "* * * * *", "count": 501}), [("count", "range")]),
        (json!({"cron_expr": "* * * * *", "tz": "UTC"}), [("tz", "unknown_field")]),
    ] {
        assert_eq!(world.post("/preview", body).await?.refused(422).rules(), rules);
    }
    Ok(())
}

#[tokio::test]
async fn the_next_fires_of_a_task_keep_its_phase() -> Result<()> {
    let world = World::start().await?;
    world.put("a", task("a", json!({"cron_expr": "EVERY 20m"}))).await?.is(201);
    world.clock.advance(25 * 60_000);
    let next = world.get("/tasks/a/next?count=2").await?.is(200);
    assert_eq!(next, json!({"fires": [NOW.plus_millis(40 * 60_000), NOW.plus_millis(60 * 60_000)]}));
    world.put("m", task("m", json!({}))).await?.is(201);
    assert_eq!(world.get("/tasks/m/next").await?.is(200), json!({"fires": []}));
    world.get("/tasks/x/next").await?.refused(404);
    Ok(())
}

#[tokio::test]
async fn what_comes_next_is_merged_over_all_tasks() -> Result<()> {
    let world = World::start().await?;
    let tasks = json!([
        task("hourly", json!({"cron_expr": "0 * * * *"})),
        task("half", json!({"cron_expr": "EVERY 30m", "executor_group": "h"})),
        task("delayed", json!({"delay_seconds": 2700})),
        task("paused", json!({"cron_expr": "* * * * *", "status": "paused"})),
        task("manual", json!({})),
    ]);
    world.post("/apply", tasks).await?.is(200);
    let fires = |answer: Value| -> Vec<(String, i64)> {
        let fires = answer["fires"].as_array().unwrap().clone();
        fires
            .into_iter()
            .map(|fire| {
                let at: ax_shared::Timestamp = fire["at"].as_str().unwrap().parse().unwrap();
                (fire["task_id"].as_str().unwrap().to_owned(), at.millis_since(NOW) / 60_000)
            })
            .collect()
    };
    let some = fires(world.get("/upcoming?limit=5").await?.is(200));
    let expected = [("half", 30), ("delayed", 45), ("half", 60), ("hourly", 60), ("half", 90)];
    assert_eq!(some, expected.map(|(id, at)| (id.to_owned(), at)));

    let until = NOW.plus_millis(60 * 60_000);
    assert_eq!(fires(world.get(&format!("/upcoming?to={until}")).await?.is(200)).len(), 4);
    assert_eq!(fires(world.get(&format!("/upcoming?from={until}&limit=1").to_owned()).await?.is(200))[0].1, 60);
    assert_eq!(fires(world.get("/upcoming?group=h&limit=2").await?.is(200)).len(), 2);

    // A short interval does not fill the answer, and that something was left out is told.
    world.put("often", task("often", json!({"cron_expr": "EVERY 1s", "executor_group": "o"}))).await?.is(201);
    for (query, many, more) in [
        ("?group=o", 10, true),
        ("?group=o&per_task=50", 50, true),
        ("?group=o&per_task=500&limit=500&to=2026-11-30T22:01:00Z", 60, false),
        ("?group=h&limit=500&per_task=500", 48, false),
        ("?limit=3", 3, true),
    ] {
        let answer = world.get(&format!("/upcoming{query}")).await?.is(200);
        assert_eq!((answer["fires"].as_array().unwrap().len(), &answer["more"]), (many, &json!(more)), "{query}");
    }
    let backward = format!("/upcoming?from={until}&to={NOW}");
    assert_eq!(world.get(&backward).await?.refused(422).rules(), [("to", "range")]);
    Ok(())
}
