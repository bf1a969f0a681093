//! The ways in which an attempt fails.

use std::time::Duration;

use ax_worker::{Context, Failure, GiveUp, Nats, Task, Worker, WorkerError};

async fn pay(amount: String, cx: Context) -> Result<u32, Failure> {
    // No further attempt can mend this: the run ends.
    let amount: u32 = amount.parse().give_up()?;
    if cx.attempt() == 1 {
        // Any error is tried again, after the wait that the task asks for.
        std::fs::read_to_string("/nowhere/account")?;
    }
    if cx.attempt() == 2 {
        // A wait of the handler's own choice.
        return Err(Failure::retry_after("the bank is busy", Duration::from_millis(200)));
    }
    if cx.attempt() == 3 {
        panic!("fails this attempt and nothing else");
    }
    Ok(amount)
}

#[tokio::main]
async fn main() -> Result<(), WorkerError> {
    let soon = Duration::from_millis(100);
    let pay_task =
        Task::new("pay", Duration::from_secs(10), 3).retry_backoff(soon, 1.0, soon, Duration::ZERO).payload("100");
    Worker::new(Nats::from_env(), "failing").task(pay_task).handler("pay", pay).concurrency(4).run().await
}
