//! Takes jobs from the store, has them answered, and writes what became of them.

use std::{
    collections::HashMap,
    future::pending,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use fornax_code::Code;
use serde_json::{Value, json};
use tokio::{
    sync::{oneshot, watch},
    task::JoinSet,
    time::MissedTickBehavior,
};

use crate::{
    Failure, Store,
    confidence::confidence,
    input::{Input, Item},
    model::{Answer, Call, Finish, Model, Question, Usage},
    store::{Chunk, Claim, Outcome, random_word},
};

/// How a runner works.
#[derive(Clone, Debug)]
pub struct RunnerOptions {
    /// Jobs at a time.
    pub jobs: usize,
    /// Items of one batch at a time.
    pub items: usize,
    /// A worker that gives no sign of life for so long has lost its jobs. It gives one three times as often.
    pub lease: Duration,
    /// How often the queue is looked at that others fill.
    pub poll: Duration,
    /// How long one attempt may take if the job says nothing.
    pub execution_timeout: Duration,
    /// How long jobs under way may take when the runner is told to stop; then they are returned.
    pub patience: Duration,
}

impl Default for RunnerOptions {
    fn default() -> RunnerOptions {
        RunnerOptions {
            jobs: 4,
            items: 8,
            lease: Duration::from_secs(15),
            poll: Duration::from_millis(500),
            execution_timeout: Duration::from_secs(600),
            patience: Duration::from_secs(30),
        }
    }
}

/// How often text that has come is written down for those who stream a job.
const TEXT_PAUSE: Duration = Duration::from_millis(250);

/// Failures with which a job is returned, as if it had not been taken.
const RETURNED: [Code; 3] = [Code::QueueFull, Code::ModelNotReady, Code::Cancelled];

/// A worker.
pub struct Runner<M> {
    store: Store,
    model: Arc<M>,
    name: String,
    worker: String,
    options: RunnerOptions,
}

/// Why an attempt is broken off.
#[derive(Debug)]
enum Break {
    /// The job is another's, or nobody's: whatever this attempt finds is not wanted.
    Lost,
    /// The runner stops.
    Return,
}

impl<M: Model> Runner<M> {
    /// A worker for the jobs of a model, called `name` in the store.
    pub fn new(store: Store, model: Arc<M>, name: impl Into<String>, options: RunnerOptions) -> Runner<M> {
        Runner { store, model, name: name.into(), worker: random_word(), options }
    }

    /// Works until `stop` says so; what is under way then is finished or returned. Returns how many were returned.
    pub async fn run(self, mut stop: watch::Receiver<bool>) -> usize {
        let mut attempts: JoinSet<String> = JoinSet::new();
        let mut breaks: HashMap<String, oneshot::Sender<Break>> = HashMap::new();
        let mut watch = Watch::default();
        let mut beat = tokio::time::interval(self.options.lease / 3);
        let mut poll = tokio::time::interval(self.options.poll);
        for interval in [&mut beat, &mut poll] {
            interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        }
        // Whether a job may be there that was not looked for.
        let mut look = true;
        while !*stop.borrow() {
            if look && attempts.len() < self.options.jobs {
                look = false;
                match self.store.claim(&self.name, &self.worker).await {
                    Ok(Some(claim)) => {
                        let (breaks_off, broken_off) = oneshot::channel();
                        breaks.insert(claim.lease.clone(), breaks_off);
                        let attempt = Attempt {
                            store: self.store.clone(),
                            model: Arc::clone(&self.model),
                            options: self.options.clone(),
                            claim,
                        };
                        attempts.spawn(attempt.run(broken_off));
                        look = true;
                        continue;
                    }
                    Ok(None) => {}
                    Err(error) => tracing::error!(reason = error.to_string(), "cannot take a job"),
                }
            }
            tokio::select! {
                _ = stop.changed() => {}
                Some(ended) = attempts.join_next() => {
                    if let Ok(lease) = ended {
                        breaks.remove(&lease);
                    }
                    look = true;
                }
                () = self.store.queued() => look = true,
                () = self.store.released() => self.beat(&mut breaks).await,
                _ = beat.tick() => {
                    self.beat(&mut breaks).await;
                    if let Err(error) = watch.look(&self.store, self.options.lease).await {
                        tracing::error!(reason = error.to_string(), "cannot look after other workers");
                    }
                }
                _ = poll.tick() => {
                    look = true;
                    if let Err(error) = self.store.sweep().await {
                        tracing::error!(reason = error.to_string(), "cannot sweep the jobs");
                    }
                }
            }
        }
        self.drain(attempts, breaks).await
    }

    async fn drain(
        &self,
        mut attempts: JoinSet<String>,
        mut breaks: HashMap<String, oneshot::Sender<Break>>,
    ) -> usize {
        let until = tokio::time::Instant::now() + self.options.patience;
        let mut beat = tokio::time::interval(self.options.lease / 3);
        loop {
            tokio::select! {
                ended = attempts.join_next() => match ended {
                    Some(Ok(lease)) => drop(breaks.remove(&lease)),
                    Some(Err(_)) => {}
                    None => return 0,
                },
                _ = beat.tick() => self.beat(&mut breaks).await,
                () = self.store.released() => self.beat(&mut breaks).await,
                () = tokio::time::sleep_until(until) => break,
            }
        }
        let returned = breaks.len();
        for (_, breaks_off) in breaks.drain() {
            // One that has just ended needs no breaking.
            breaks_off.send(Break::Return).ok();
        }
        while attempts.join_next().await.is_some() {}
        returned
    }

    /// Shows that this worker lives, and breaks off what is not its any more.
    async fn beat(&self, breaks: &mut HashMap<String, oneshot::Sender<Break>>) {
        if breaks.is_empty() {
            return;
        }
        match self.store.beat(&self.worker).await {
            Ok(held) => {
                let lost: Vec<String> =
                    breaks.keys().filter(|lease| !held.contains(lease)).cloned().collect();
                for lease in lost {
                    if let Some(breaks_off) = breaks.remove(&lease) {
                        breaks_off.send(Break::Lost).ok();
                    }
                }
            }
            // Whoever finds the leases silent takes them; completing under a lost lease changes nothing.
            Err(error) => tracing::error!(reason = error.to_string(), "cannot show that this worker lives"),
        }
    }
}

/// What was seen of everybody's leases, and when by our own clock.
#[derive(Default)]
struct Watch {
    seen: HashMap<String, (i64, Instant)>,
}

impl Watch {
    /// Takes the leases that have given no sign of life for long enough.
    async fn look(&mut self, store: &Store, lease: Duration) -> Result<(), crate::Error> {
        let now = Instant::now();
        let mut seen = HashMap::new();
        for (name, beat) in store.leases().await? {
            let since = match self.seen.get(&name) {
                Some((known, since)) if *known == beat => *since,
                _ => now,
            };
            if now.duration_since(since) >= lease {
                if store.recover(&name, Some(beat)).await? {
                    tracing::warn!("a job was taken from a worker that gave no sign of life");
                }
            } else {
                seen.insert(name, (beat, since));
            }
        }
        self.seen = seen;
        Ok(())
    }
}

/// One attempt at a job.
struct Attempt<M> {
    store: Store,
    model: Arc<M>,
    options: RunnerOptions,
    claim: Claim,
}

impl<M: Model> Attempt<M> {
    /// Works on the job and writes what became of it. Returns its lease.
    async fn run(self, broken_off: oneshot::Receiver<Break>) -> String {
        let began = Instant::now();
        let policy = self.claim.job.policy.execution_timeout_ms;
        let limit = policy.map_or(self.options.execution_timeout, |ms| {
            Duration::from_millis(u64::try_from(ms).unwrap_or(0))
        });
        let broken_off = async {
            match broken_off.await {
                Ok(why) => why,
                // The runner itself is gone; its leases will be found silent.
                Err(_) => pending().await,
            }
        };
        let outcome = tokio::select! {
            outcome = self.work() => outcome,
            why = broken_off => match why {
                Break::Lost => None,
                Break::Return => Some(Outcome::Returned),
            },
            () = tokio::time::sleep(limit) => {
                let message = format!("the job was computed for longer than {} ms", limit.as_millis());
                Some(Outcome::TimedOut(Failure::retryable(Code::ExecutionTimeout, "generate", message)))
            }
        };
        if let Some(outcome) = outcome {
            self.write(outcome, began.elapsed()).await;
        }
        self.claim.lease
    }

    async fn write(&self, outcome: Outcome, execution: Duration) {
        let (id, attempt) = (&self.claim.job.id, self.claim.job.attempts);
        let word = match &outcome {
            Outcome::Completed(_) => "completed",
            Outcome::Failed(failure) | Outcome::TimedOut(failure) => failure.code.name(),
            Outcome::Returned => "returned",
        };
        match self.store.finish(&self.claim, outcome, execution).await {
            Ok(held) => {
                let milliseconds = u64::try_from(execution.as_millis()).unwrap_or(u64::MAX);
                tracing::info!(job = id, attempt, outcome = word, held, milliseconds, "job");
            }
            // The job stays under its lease, which will be found silent: nothing is lost, the work is done again.
            Err(error) => {
                tracing::error!(job = id, reason = error.to_string(), "cannot write what became of a job")
            }
        }
    }

    /// What becomes of it; `None` when nobody wants to know.
    async fn work(&self) -> Option<Outcome> {
        let input: Value = serde_json::from_str(&self.claim.job.input).unwrap_or(Value::Null);
        let done = match &self.claim.job.route {
            Some(route) => self.respond(route, input).await,
            None => match Input::parse(&input) {
                Ok(Input::One(question)) => self.one(question).await,
                Ok(Input::Batch(items)) => self.batch(items).await,
                Ok(Input::Health) => Ok(Outcome::Completed(self.health())),
                Err(failure) => Ok(Outcome::Failed(failure)),
            },
        };
        match done {
            Ok(outcome) => Some(outcome),
            // The engine has no room, or the server stops: that is no fault of the job's.
            Err(Stop::Failed(failure)) if RETURNED.contains(&failure.code) => Some(Outcome::Returned),
            Err(Stop::Failed(failure)) => Some(Outcome::Failed(failure)),
            Err(Stop::Lost) => None,
        }
    }

    fn health(&self) -> Value {
        let (model, quant) = self.model.facts();
        json!({"success": true, "output": {"status": "healthy"}, "metadata": {"model": model, "quant": quant}})
    }

    /// What a route answers, as it stands.
    async fn respond(&self, route: &str, body: Value) -> Result<Outcome, Stop> {
        let response = self.model.respond(&self.claim.job.owner, route, body).await?;
        Ok(Outcome::Completed(json!({"success": true, "response": response})))
    }

    /// One answer, its text written down as it comes.
    async fn one(&self, question: Question) -> Result<Outcome, Stop> {
        let heard = Mutex::new(String::new());
        let take = || std::mem::take(&mut *heard.lock().unwrap_or_else(PoisonError::into_inner));
        let mut answer = std::pin::pin!(self.model.answer(&self.claim.job.owner, question.clone(), |text| {
            heard.lock().unwrap_or_else(PoisonError::into_inner).push_str(text);
        }));
        let mut pause = tokio::time::interval(TEXT_PAUSE);
        let mut n = 0;
        let answer = loop {
            let answered = tokio::select! {
                answered = &mut answer => Some(answered),
                _ = pause.tick() => None,
            };
            let text = take();
            if !text.is_empty() {
                let body = json!({"text": text, "attempt": self.claim.job.attempts});
                self.keep(n, body, false).await?;
                n += 1;
            }
            if let Some(answered) = answered {
                break answered?;
            }
        };
        let mut envelope = settle(&question, &answer)?;
        self.add_facts(&mut envelope["metadata"]);
        Ok(Outcome::Completed(envelope))
    }

    /// A result or an error for each item. Those that are finished are written down: another attempt goes on behind
    /// them.
    async fn batch(&self, items: Vec<Item>) -> Result<Outcome, Stop> {
        let finished = self.store.finished_items(&self.claim.job.id).await.map_err(Stop::from)?;
        let mut results: Vec<Option<Value>> = vec![None; items.len()];
        for chunk in finished {
            if let Some(result) = usize::try_from(chunk.n).ok().and_then(|n| results.get_mut(n)) {
                *result = Some(chunk.body);
            }
        }
        let items = items.into_iter().enumerate();
        let mut open = items.filter(|(index, _)| results[*index].is_none()).collect::<Vec<_>>().into_iter();
        let (heard, mut is_heard) = watch::channel(false);
        let heard = Arc::new(heard);
        let mut answers = JoinSet::new();
        // The first one computes what all begin with; the others start when that is there to be found.
        let mut seats = 1;
        let mut failed = None;
        loop {
            while answers.len() < seats && failed.is_none() {
                let Some((index, item)) = open.next() else { break };
                let asked = Asked { owner: self.claim.job.owner.clone(), index, item };
                answers.spawn(answered(Arc::clone(&self.model), asked, Arc::clone(&heard)));
            }
            let ended = tokio::select! {
                ended = answers.join_next() => ended,
                _ = is_heard.wait_for(|heard| *heard), if seats < self.options.items => {
                    seats = self.options.items;
                    continue;
                }
            };
            let (index, id, settled) = match ended {
                None => break,
                Some(Ok(ended)) => ended,
                Some(Err(_)) => {
                    let message = "an item of the batch failed inside the server";
                    failed = Some(Failure::retryable(Code::Internal, "generate", message));
                    continue;
                }
            };
            let mut result = match settled {
                Ok(envelope) => envelope,
                // The attempt is repeated, without the items that are finished: those under way still may be.
                Err(failure) if failure.retryable => {
                    failed = Some(failure);
                    continue;
                }
                Err(failure) => failure.envelope(self.claim.job.attempts),
            };
            result["id"] = json!(id);
            result["index"] = json!(index);
            self.keep(i64::try_from(index).unwrap_or(i64::MAX), result.clone(), true).await?;
            results[index] = Some(result);
        }
        if let Some(failure) = failed {
            return Err(Stop::Failed(failure));
        }
        Ok(self.whole(results.into_iter().flatten().collect()))
    }

    /// The envelope of a batch. It is a success if all its items are, and a failure of its own if none is.
    fn whole(&self, results: Vec<Value>) -> Outcome {
        let failed = results.iter().filter(|result| result["success"] == json!(false)).count();
        if failed == results.len() && failed > 0 {
            let message = format!("each of the {failed} items failed");
            let diagnostics = Box::new(json!({"items": results}));
            let code = results.first().map_or(Code::Internal, |result| known(&result["code"]));
            return Outcome::Failed(Failure { diagnostics, ..Failure::new(code, "generate", message) });
        }
        let mut usage = Usage::default();
        for counts in results.iter().map(|result| &result["metadata"]["usage"]) {
            let count =
                |name: &str| counts[name].as_u64().and_then(|count| usize::try_from(count).ok()).unwrap_or(0);
            usage.prompt += count("prompt");
            usage.cached += count("cached");
            usage.completion += count("completion");
        }
        let mut metadata = json!({
            "usage": usage.to_json(),
            "items": {"completed": results.len() - failed, "failed": failed},
        });
        self.add_facts(&mut metadata);
        Outcome::Completed(json!({"success": failed == 0, "output": results, "metadata": metadata}))
    }

    fn add_facts(&self, metadata: &mut Value) {
        let (model, quant) = self.model.facts();
        metadata["model"] = json!(model);
        metadata["quant"] = json!(quant);
        metadata["attempt"] = json!(self.claim.job.attempts);
    }

    async fn keep(&self, n: i64, body: Value, is_item: bool) -> Result<(), Stop> {
        match self.store.add_chunk(&self.claim, &Chunk { n, body }, is_item).await {
            Ok(true) => Ok(()),
            Ok(false) => Err(Stop::Lost),
            Err(error) => Err(error.into()),
        }
    }
}

/// An item of a batch, and whose it is.
struct Asked {
    owner: String,
    index: usize,
    item: Item,
}

/// An item's answer, judged. Says when the first word of it was heard.
async fn answered<M: Model>(
    model: Arc<M>,
    asked: Asked,
    heard: Arc<watch::Sender<bool>>,
) -> (usize, String, Result<Value, Failure>) {
    let Asked { owner, index, item } = asked;
    let question = item.question();
    let hears = |_: &str| {
        heard.send_replace(true);
    };
    let answered = model.answer(&owner, question.clone(), hears).await;
    heard.send_replace(true);
    (index, item.id, answered.and_then(|answer| settle(&question, &answer)))
}

/// Why an attempt cannot go on.
enum Stop {
    Failed(Failure),
    /// The job is not ours any more.
    Lost,
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Stop {
        Stop::Failed(failure)
    }
}

impl From<crate::Error> for Stop {
    fn from(error: crate::Error) -> Stop {
        let code = if matches!(error, crate::Error::DiskFull) { Code::DiskFull } else { Code::Internal };
        Stop::Failed(Failure::retryable(code, "generate", error.to_string()))
    }
}

/// The code of a stored result, where it says what is wrong with the batch as well.
fn known(code: &Value) -> Code {
    let of_batch = |code: &Code| {
        matches!(
            code,
            Code::OutputTruncated
                | Code::SchemaUnsupported
                | Code::PromptTooLong
                | Code::InvalidInput
                | Code::NumericFault
                | Code::ModelUnsupported
                | Code::ModelNotFound
        )
    };
    code.as_str().and_then(Code::named).filter(of_batch).unwrap_or(Code::Internal)
}

/// An answer as a result, if it is one: whole, and valid against its schema in the eyes of a second implementation.
fn settle(question: &Question, answer: &Answer) -> Result<Value, Failure> {
    let (output, confidence) = match &question.schema {
        Some(_) if answer.finish != Finish::Stop => return Err(Failure::truncated(answer.usage.completion)),
        None if answer.finish == Finish::Truncated => {
            return Err(Failure::truncated(answer.usage.completion));
        }
        Some(schema) => {
            let output = schema.judge(&answer.text).map_err(|place| {
                let message = format!("the answer is not valid against its schema, at {place:?}");
                Failure::new(Code::Internal, "validate", message)
            })?;
            (output, confidence(schema, &answer.text, &answer.tokens))
        }
        None => (json!(answer.text), serde_json::Map::new()),
    };
    let timings = answer.timings;
    let mut metadata = json!({
        "usage": answer.usage.to_json(),
        "timings": {"queue": timings.queue, "prefill": timings.prefill, "decode": timings.decode},
        "finish_reason": match answer.finish {
            Finish::Length => "length",
            _ if !answer.calls.is_empty() => "tool_calls",
            _ => "stop",
        },
        "seed": answer.seed,
        "schema": question.schema.as_ref().map(|schema| schema.name().unwrap_or("inline")),
    });
    if !confidence.is_empty() {
        metadata["confidence"] = Value::Object(confidence);
    }
    let mut result = json!({"success": true, "output": output, "metadata": metadata});
    if !answer.reasoning.is_empty() {
        result["reasoning_content"] = json!(answer.reasoning);
    }
    if !answer.calls.is_empty() {
        result["tool_calls"] = answer.calls.iter().map(Call::to_json).collect();
    }
    Ok(result)
}
