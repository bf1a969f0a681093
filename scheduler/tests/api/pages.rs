//! The pages for people.

use anyhow::Result;
use serde_json::json;

use crate::world::{World, task};

#[tokio::test]
async fn pages_show_tasks_and_runs_and_escape_everything() -> Result<()> {
    let world = World::start().await?;
    assert!(world.page("/").await?.1.contains("No task is defined yet"));
    let evil = "<script>alert(1)</script>\"'&";
    let definition = json!({"name": evil, "description": evil, "payload": {"x": evil}, "cron_expr": "0 2 * * *",
        "timezone": "Asia/Shanghai"});
    world.put("a.b", task("a.b", definition)).await?.is(201);
    let body = json!({"reason": evil, "payload": {"x": evil}});
    let run = world.post("/tasks/a.b/trigger", body).await?.is(201);
    let run = run["run_id"].as_str().unwrap();
    for (path, words) in [
        ("/".to_owned(), ["a.b", "2026-12-01 18:00:00", run]),
        ("/tasks/a.b".to_owned(), ["0 2 * * *", "2026-12-02 02:00:00 CST", run]),
        (format!("/runs/{run}"), ["manual", "requested", "pending"]),
    ] {
        let (status, html) = world.page(&path).await?;
        assert_eq!(status, 200, "{path}");
        for word in words {
            assert!(html.contains(word), "{path} lacks {word}: {html}");
        }
        assert!(html.contains("alert(1)") && !html.contains("<script"), "{path}: {html}");
    }
    assert_eq!(world.page("/tasks/none").await?.0, 404);
    assert_eq!(world.page("/runs/none").await?.0, 404);
    assert_eq!(world.page("/?limit=x").await?.0, 422);
    assert_eq!(world.page("/?limit=1").await?.0, 200);
    Ok(())
}
