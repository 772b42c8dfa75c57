//! Named phases of a task: each is timed, and a failed one does not hide what the others find.

use std::time::{Duration, Instant};

use anyhow::Result;

/// The phases of one task, in order.
pub(crate) struct Phases {
    task: &'static str,
    done: Vec<Phase>,
}

struct Phase {
    name: &'static str,
    time: Duration,
    outcome: Outcome,
}

/// How a phase ended when nothing was wrong.
pub(crate) enum Outcome {
    Passed,
    /// It could not run here; the text says why, and is shown.
    LeftOut(String),
    Failed,
}

impl Phases {
    pub(crate) fn new(task: &'static str) -> Self {
        Self { task, done: Vec::new() }
    }

    /// Runs a phase and shows its failure at once. Returns whether it passed.
    pub(crate) fn run(&mut self, name: &'static str, phase: impl FnOnce() -> Result<Outcome>) -> bool {
        println!("==> {}: {name}", self.task);
        let start = Instant::now();
        let outcome = phase().unwrap_or_else(|error| {
            println!("{name}: {error:#}");
            Outcome::Failed
        });
        let passed = !matches!(outcome, Outcome::Failed);
        self.done.push(Phase { name, time: start.elapsed(), outcome });
        passed
    }

    /// Prints the time of each phase; an error if one failed.
    pub(crate) fn finish(self) -> Result<()> {
        println!("==> {}: time per phase", self.task);
        for phase in &self.done {
            let outcome = match &phase.outcome {
                Outcome::Passed => String::new(),
                Outcome::LeftOut(why) => format!("  left out: {why}"),
                Outcome::Failed => "  FAILED".to_owned(),
            };
            println!("{:>8.1} s  {}{outcome}", phase.time.as_secs_f64(), phase.name);
        }
        let failed = self.done.iter().filter(|phase| matches!(phase.outcome, Outcome::Failed));
        let failed: Vec<_> = failed.map(|phase| phase.name).collect();
        anyhow::ensure!(failed.is_empty(), "{} failed in: {}", self.task, failed.join(", "));
        Ok(())
    }
}
