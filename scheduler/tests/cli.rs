//! The command line as people and scripts meet it, without a server: arguments, exit codes, schedules, what is sent.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpListener;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// Nothing listens there.
const NOWHERE: &str = "http://127.0.0.1:1";

/// The program in an empty folder, with none of the caller's settings.
fn ax(folder: &tempfile::TempDir, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ax"));
    command.current_dir(folder.path()).args(arguments).stdin(Stdio::null());
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("AX_")) {
        command.env_remove(name);
    }
    command
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

/// Runs the program where there is no server.
fn alone(arguments: &[&str]) -> Output {
    ax(&folder(), arguments).env("AX_API_URL", NOWHERE).output().unwrap()
}

fn out(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn err(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// A server of one answer: the status line, type and body to give; returns its address and, later, what it was asked.
fn answering(
    status: &'static str,
    kind: &'static str,
    body: &'static str,
) -> (String, std::thread::JoinHandle<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let asked = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let (mut request, mut length) = (String::new(), 0);
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            if line.trim().is_empty() {
                break;
            }
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().unwrap();
            }
            request.push_str(&line);
        }
        let mut sent = vec![0; length];
        reader.read_exact(&mut sent).unwrap();
        request.push_str(&String::from_utf8(sent).unwrap());
        let head = format!("HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\r\n", body.len());
        stream.write_all(format!("{head}{body}").as_bytes()).unwrap();
        request
    });
    (url, asked)
}

#[test]
fn a_wrong_call_is_two() {
    for arguments in [
        &["fry"][..],
        &[],
        &["task"],
        &["task", "fry"],
        &["task", "get"],
        &["task", "get", "../nodes"],
        &["task", "get", "."],
        &["task", "rm", ""],
        &["task", "trigger", "a", "--payload", "{"],
        &["task", "trigger", "a", "--delay", "5"],
        &["task", "trigger", "a", "--delay", "-5s"],
        &["task", "ls", "--limit", "0"],
        &["apply"],
        &["run", "get", "report.daily"],
        &["run", "find", "a b"],
        &["run", "ls", "--state", "done"],
        &["run", "ls", "--from", "yesterday"],
        &["next"],
        &["next", "0", "2", "*"],
        &["next", "@daily", "--count", "0"],
        &["next", "@daily", "--after", "2027-01-01"],
        &["next", "a", "--tz", "UTC"],
        &["next", "ü"],
        &["enqueue"],
        &["enqueue", "a", "-f", "runs.json"],
        &["nodes", "--api-url", "127.0.0.1:8420"],
        &["nodes", "--api-url", "localhost:8420"],
        &["nodes", "--api-url", "https://example.com"],
        &["nodes", "--token", "a\nb"],
        &["nodes", "--config", "not-there.toml"],
    ] {
        let done = alone(arguments);
        assert_eq!(done.status.code(), Some(2), "{arguments:?}: {}", err(&done));
        assert!(out(&done).is_empty() && !err(&done).is_empty(), "{arguments:?}");
    }
}

#[test]
fn nobody_there_is_three() {
    for arguments in [
        &["task", "ls"][..],
        &["task", "get", "a"],
        &["task", "rm", "a"],
        &["task", "pause", "a"],
        &["task", "resume", "a"],
        &["task", "trigger", "a", "--payload", "-5"],
        &["run", "ls"],
        &["run", "get", "0199aa6e5b548c8e9b0f4c7d5a0e4a11"],
        &["run", "find", "a"],
        &["next", "every_day"],
        &["upcoming"],
        &["enqueue", "a"],
        &["nodes", "--json"],
    ] {
        let done = alone(arguments);
        assert_eq!(done.status.code(), Some(3), "{arguments:?}: {}", err(&done));
        assert!(err(&done).contains(NOWHERE) && err(&done).contains("AX_API_URL"), "{}", err(&done));
    }
}

#[test]
fn not_now_is_three_and_a_refusal_is_one_with_every_field() {
    let away = r#"{"type":"about:blank","title":"unavailable","status":503,"detail":"try again"}"#;
    let (url, _) = answering("503 Service Unavailable", "application/problem+json", away);
    let done = ax(&folder(), &["task", "ls", "--api-url", &url]).output().unwrap();
    assert_eq!((done.status.code(), err(&done).as_str()), (Some(3), "ax: unavailable: try again\n"));

    let refused = r#"{"type":"about:blank","title":"invalid","status":422,"detail":"two \u001b[2J things","errors":[{"field":"delay_ms","rule":"range","message":"is too long"},{"field":"","rule":"x","message":"no"}]}"#;
    let (url, _) = answering("422 Unprocessable Content", "application/problem+json", refused);
    let done = ax(&folder(), &["enqueue", "a", "--json", "--api-url", &url]).output().unwrap();
    assert_eq!(done.status.code(), Some(1));
    let told = "ax: invalid: two \\u{1b}[2J things\n  delay_ms: is too long\n  no\n";
    assert_eq!(err(&done), told);
    assert_eq!(out(&done).trim_end(), refused);

    // Something else listens there.
    let (url, _) = answering("404 Not Found", "text/html", "<h1>nginx</h1>");
    let done = ax(&folder(), &["run", "find", "a", "--api-url", &url]).output().unwrap();
    assert!(done.status.code() == Some(1) && err(&done).contains("404"), "{}", err(&done));
}

#[test]
fn the_server_is_named_by_flag_then_variable_then_file() {
    let folder = folder();
    let (in_file, asked) = answering("200 OK", "application/json", "{\"nodes\": [ ] }");
    std::fs::write(folder.path().join("ax.toml"), format!("api_url = \"{in_file}/\"\ntoken = \"t1\"\n")).unwrap();
    let done = ax(&folder, &["nodes", "--json"]).output().unwrap();
    // As it was answered, blanks and all.
    assert_eq!(out(&done), "{\"nodes\": [ ] }\n");
    let request = asked.join().unwrap().to_ascii_lowercase();
    assert!(request.starts_with("get /api/v1/nodes http") && request.contains("bearer t1"), "{request}");

    let (by_flag, asked) = answering("200 OK", "application/json", "{\"nodes\": []}");
    let mut command = ax(&folder, &["nodes", "--api-url", &by_flag]);
    let done = command.env("AX_API_URL", NOWHERE).env("AX_TOKEN", "t2").output().unwrap();
    assert!(done.status.success(), "{}", err(&done));
    assert!(asked.join().unwrap().to_ascii_lowercase().contains("bearer t2"));
    let done = ax(&folder, &["nodes"]).env("AX_API_URL", NOWHERE).output().unwrap();
    assert_eq!(done.status.code(), Some(3));
}

#[test]
fn next_needs_no_server_for_an_expression() {
    let after = ["--after", "2026-10-24T12:00:00Z", "--count", "2"];
    let arguments = ["next", "0 2 * * *", "--tz", "europe/berlin"];
    let done = alone(&[&arguments[..], &after[..], &["--json"]].concat());
    assert_eq!(out(&done), "{\"fires\":[\"2026-10-25T00:00:00.000Z\",\"2026-10-26T01:00:00.000Z\"]}\n");
    let done = alone(&[&arguments[..], &after[..]].concat());
    let shown = out(&done);
    for piece in ["LOCAL (Europe/Berlin)", "Sun 2026-10-25 02:00:00 +02:00  2026-10-25T00:00:00.000Z", "+01:00"] {
        assert!(shown.contains(piece), "{shown}");
    }
    // EVERY counts from the instant that is given.
    let done = alone(&["next", "PT1.5S", "--after", "2026-10-24T12:00:00+02:00", "-n", "1", "--json"]);
    assert_eq!(out(&done), "{\"fires\":[\"2026-10-24T10:00:01.500Z\"]}\n");
    let done = alone(&["next", "0 0 0 1 1 ? 2020"]);
    assert_eq!((done.status.code(), out(&done).as_str()), (Some(0), "none any more\n"));
    assert_eq!(out(&alone(&["next", "@hourly"])).lines().count(), 11);
}

#[test]
fn next_refuses_as_the_api_does() {
    for (arguments, field, value) in [
        (&["next", "0 25 * * *"][..], "cron_expr", "25"),
        (&["next", "@fortnightly"], "cron_expr", "@fortnightly"),
        (&["next", "0 2 * * *", "--tz", "Mars/Base"], "timezone", "Mars/Base"),
    ] {
        let done = alone(arguments);
        assert_eq!(done.status.code(), Some(1), "{arguments:?}");
        // One reason is told once.
        let told = err(&done);
        assert!(told.starts_with(&format!("ax: invalid: {field}: ")) && told.contains(value), "{told}");
        assert_eq!(told.lines().count(), 1, "{told}");
    }
    let done = alone(&["next", "0 25 * * *", "--json"]);
    let problem: Value = serde_json::from_str(&out(&done)).unwrap();
    assert_eq!((&problem["status"], &problem["errors"][0]["field"]), (&422.into(), &"cron_expr".into()));
}

#[test]
fn a_folder_is_one_document_in_the_order_of_names_and_keeps_what_is_written() {
    let folder = folder();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write("b.json", r#"[{"task_id":"b1","payload":12345678901234567890123},{"task_id":"b2"}]"#);
    write("a.json", r#"{"task_id": "a"}"#);
    write("c.json", r#"{"tasks":[{"task_id":"c"}]}"#);
    write(".hidden.json", "broken");
    write("notes.txt", "broken");
    std::fs::create_dir(folder.path().join("sub.json")).unwrap();
    let report = r#"{"type":"about:blank","title":"invalid","status":422,"detail":"tasks[2].task_id: is at tasks[0]","errors":[{"field":"tasks[2].task_id","rule":"conflict","message":"is at tasks[0]"}]}"#;
    let (url, asked) = answering("422 Unprocessable Content", "application/problem+json", report);
    let done = ax(&folder, &["apply", "-f", ".", "--dry-run", "--strict", "--api-url", &url]).output().unwrap();
    assert_eq!(done.status.code(), Some(1));
    let told = "b.json: [1].task_id: is at ./a.json\n";
    assert_eq!(err(&done), format!("ax: invalid: ./{told}"));
    let request = asked.join().unwrap();
    assert!(request.starts_with("POST /api/v1/apply?dry_run=true&strict=true "), "{request}");
    let body = request.lines().last().unwrap();
    let tasks =
        r#"{"task_id": "a"},{"task_id":"b1","payload":12345678901234567890123},{"task_id":"b2"},{"task_id":"c"}"#;
    assert_eq!(body, format!("{{\"tasks\":[{tasks}]}}"));
}

#[test]
fn what_cannot_be_read_is_named_before_anybody_is_asked() {
    let folder = folder();
    let write = |name: &str, text: &[u8]| std::fs::write(folder.path().join(name), text).unwrap();
    write("cut.json", b"{\"task_id\": ");
    write("latin.json", b"\"\xe9\"");
    write("text.json", b"\"a\"");
    write("both.json", b"{\"tasks\": [], \"name\": 1}");
    std::fs::create_dir(folder.path().join("empty")).unwrap();
    let apply = |file: &str| ax(&folder, &["apply", "-f", file, "--api-url", NOWHERE]).output().unwrap();
    for file in ["cut.json", "latin.json", "not-there.json", "empty"] {
        let done = apply(file);
        assert!(done.status.code() == Some(1) && err(&done).contains(file), "{}", err(&done));
    }
    let done = apply(".");
    assert_eq!(done.status.code(), Some(1));
    for file in ["cut.json", "latin.json", "text.json", "both.json"] {
        assert!(err(&done).contains(file), "{}", err(&done));
    }
    // Nothing at all on standard input.
    let done = apply("-");
    assert!(done.status.code() == Some(1) && err(&done).contains("standard input"), "{}", err(&done));
}

#[test]
fn an_order_is_sent_as_it_was_written() {
    let folder = folder();
    std::fs::write(folder.path().join("order.json"), "{\"n\": 1.10}").unwrap();
    let answer = r#"{"run_id":"0199aa6e-5b54-8c8e-9b0f-4c7d5a0e4a11","created":false}"#;
    let (url, asked) = answering("200 OK", "application/json", answer);
    let arguments = ["task", "trigger", "a.b", "--payload", "@order.json", "--delay", "1m30s", "--key", "k"];
    let done = ax(&folder, &[&arguments[..], &["--api-url", &url]].concat()).output().unwrap();
    assert!(done.status.success() && out(&done).contains("0199aa6e-5b54"), "{}", err(&done));
    let request = asked.join().unwrap();
    assert!(request.starts_with("POST /api/v1/tasks/a.b/trigger "), "{request}");
    let body = r#"{"payload":{"n": 1.10},"delay_ms":90000,"idempotency_key":"k"}"#;
    assert_eq!(request.lines().last().unwrap(), body);

    std::fs::write(folder.path().join("runs.json"), " [{\"task_id\": \"a\"}]\n").unwrap();
    let (url, asked) = answering("201 Created", "application/json", r#"{"runs":[]}"#);
    assert!(ax(&folder, &["enqueue", "-f", "runs.json", "--api-url", &url]).status().unwrap().success());
    assert!(asked.join().unwrap().ends_with("{\"runs\":[{\"task_id\": \"a\"}]}"));
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let folder = folder();
    let mut command = ax(&folder, &["next", "* * * * *", "--count", "500"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let done = child.wait_with_output().unwrap();
    assert_eq!((done.status.code(), err(&done).as_str()), (Some(0), ""));
}

#[test]
fn what_cannot_be_written_fails_the_command() {
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let done = ax(&folder(), &["next", "@daily", "--json"]).stdout(full).output().unwrap();
    assert_eq!(done.status.code(), Some(1));
    assert!(err(&done).starts_with("ax: standard output cannot be written: "), "{}", err(&done));
}

#[test]
fn times_are_those_of_the_reader_with_the_date_when_it_is_not_today() {
    let page = r#"{"fires":[{"task_id":"a","at":"2020-06-30T22:30:00.000Z"},{"task_id":"b","at":"2020-06-30T22:30:00.250Z"}]}"#;
    let (url, _) = answering("200 OK", "application/json", page);
    let done = ax(&folder(), &["upcoming", "--api-url", &url]).env("TZ", "Europe/Berlin").output().unwrap();
    let shown = out(&done);
    let lines: Vec<Vec<&str>> = shown.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(&lines[0][..], ["LOCAL", "(Europe/Berlin)", "UTC", "TASK"], "{shown}");
    assert_eq!(&lines[1][..4], ["2020-07-01", "00:30:00", "2020-06-30T22:30:00.000Z", "a"], "{shown}");
    assert_eq!(&lines[2][..4], ["2020-07-01", "00:30:00.250", "2020-06-30T22:30:00.250Z", "b"], "{shown}");
}

#[test]
fn a_search_tells_when_there_are_more_and_how_to_see_them() {
    // Keys out of order and a blank: nothing of a run is written anew.
    let page = r#"{"runs":[{"task_id": "a","run_id":"0199aa6e-5b54-8c8e-9b0f-4c7d5a0e4a11"},{"task_id":"a","run_id":"0199aa6e-5b55-8c8e-9b0f-4c7d5a0e4a11"}]}"#;
    let (url, _) = answering("200 OK", "application/json", page);
    let done = ax(&folder(), &["run", "find", "0199aa6e", "--json", "--api-url", &url]).output().unwrap();
    assert_eq!((out(&done).trim_end(), err(&done).as_str()), (page, ""));

    let (url, _) = answering("200 OK", "application/json", page);
    let done = ax(&folder(), &["run", "find", "0199aa6e", "--limit", "1", "--api-url", &url]).output().unwrap();
    assert_eq!((done.status.code(), out(&done).lines().count()), (Some(0), 2));
    assert_eq!(err(&done), "there are more: more digits, or a larger --limit\n");

    let page = r#"{"runs":[{"task_id":"a","run_id":"0199aa6e-5b54-8c8e-9b0f-4c7d5a0e4a11"}],"next_cursor":"c"}"#;
    let (url, _) = answering("200 OK", "application/json", page);
    let done = ax(&folder(), &["run", "find", "a", "--limit", "1", "--api-url", &url]).output().unwrap();
    assert!(err(&done).contains("ax run ls --task a") && !err(&done).contains("--cursor"), "{}", err(&done));
}

#[test]
fn the_version_names_the_time_zones_and_help_has_examples() {
    let done = alone(&["--version"]);
    assert!(out(&done).starts_with("ax 0.") && out(&done).contains("(tzdata 20"), "{}", out(&done));
    assert_eq!(out(&alone(&["version"])), out(&done));
    for command in ["apply", "next", "upcoming", "enqueue"] {
        assert!(out(&alone(&[command, "--help"])).contains(&format!("  ax {command} ")), "{command}");
    }
    for command in [["task", "trigger"], ["run", "find"], ["run", "ls"], ["task", "ls"]] {
        let [outer, inner] = command;
        assert!(out(&alone(&[outer, inner, "--help"])).contains(&format!("  ax {outer} {inner} ")), "{command:?}");
    }
}
