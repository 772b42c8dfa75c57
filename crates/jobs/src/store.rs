//! The one place where jobs are: a database that has them on disk before anybody is told.
//!
//! Every rule is written once, for SQLite and for PostgreSQL: the statements use only what both understand. A change of
//! a job's state, its event and its webhook are one transaction. Whoever works on a job holds a lease, a random word
//! that every claim makes anew; what a worker writes names its lease and changes nothing once the lease is another's.
//! So a job may be begun more than once and is completed once.

use std::{
    collections::HashMap,
    fs::{self, File},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use fornax_code::Code;
use serde_json::{Value, json};
use sqlx::{
    Any, AnyPool, Row, Transaction,
    any::{AnyPoolOptions, AnyRow},
};
use tokio::sync::{Notify, broadcast, mpsc, oneshot};

use crate::{
    Error, Failure,
    clock::Clock,
    job::{Counts, Job, NewJob, State, TimelineEvent, columns},
    submit::{Submission, Submitted, fingerprint, write_together},
};

/// How a store is kept.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// A file for SQLite, or `postgres://…`.
    pub database: String,
    /// Jobs that may wait for each model. Exact within a process; others' jobs are seen within a second.
    pub queue_max: u64,
    /// Attempts before a job is given up.
    pub attempts_max: i64,
    /// How long results are kept.
    pub retention: Duration,
    /// Files that one owner may keep.
    pub files_max: u64,
    /// Bytes of all files of one owner; what answers are written to is counted, and never refused.
    pub file_bytes_max: u64,
    /// Responses that one owner may keep; those that were not used for the longest make room.
    pub responses_max: u64,
    /// Bytes of all responses of one owner.
    pub response_bytes_max: u64,
    /// Bytes of what one owner's jobs ask, while they are kept; known within a second. Where there are no other owners they
    /// are not counted.
    pub job_bytes_max: u64,
    /// Bytes that SQLite's file may grow to.
    pub bytes_max: Option<u64>,
    /// The time of day in microseconds, where it is not to be asked for.
    pub wall_us: Option<i64>,
}

impl StoreOptions {
    /// The defaults for a database.
    pub fn new(database: impl Into<String>) -> StoreOptions {
        StoreOptions {
            database: database.into(),
            queue_max: 100_000,
            attempts_max: 3,
            retention: Duration::from_secs(24 * 3600),
            files_max: 1000,
            file_bytes_max: 1 << 30,
            responses_max: 10_000,
            response_bytes_max: 256 << 20,
            job_bytes_max: 4 << 30,
            bytes_max: None,
            wall_us: None,
        }
    }
}

/// Which database it is, where that makes a difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Sqlite,
    Postgres,
}

/// Submissions written in one transaction: enough to hide the disk's latency, few enough to answer soon.
const TOGETHER_MAX: usize = 256;

/// Connections to PostgreSQL, and readers of SQLite's file. SQLite has one writer, so that writers queue here and not
/// in busy loops.
const CONNECTIONS: u32 = 8;

/// Rows that one sweep deletes or times out, so that nobody waits long behind it.
const SWEEP_MAX: i64 = 500;

/// How old the count of waiting jobs may be.
const COUNT_AGE: Duration = Duration::from_secs(1);

/// The pause after the first failed attempt; twice as long after each further one.
const RETRY_PAUSE_US: i64 = 1_000_000;

/// Schemas that an owner may register for each model.
const SCHEMAS_MAX: u64 = 1000;

/// Jobs on disk.
#[derive(Clone)]
pub struct Store {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    kind: Kind,
    pub(crate) writer: AnyPool,
    pub(crate) reader: AnyPool,
    pub(crate) clock: Clock,
    options: StoreOptions,
    submissions: mpsc::Sender<Submission>,
    /// Something is in the queue.
    queued: Notify,
    /// A job was taken from who works on it.
    pub(crate) released: Notify,
    /// Ids of jobs that changed, for those who wait for one.
    changes: broadcast::Sender<Arc<str>>,
    waiting: Mutex<Vec<Waiting>>,
    /// By owner, the bytes of their jobs when they were last summed, and of those that came since.
    held: Mutex<HashMap<String, (u64, Instant)>>,
    /// By model and owner, when a job of theirs was last taken here, as a number that grows.
    turns: Mutex<HashMap<(String, String), u64>>,
    /// Held as long as the store is open: nobody else has SQLite's file.
    lock: Mutex<Option<File>>,
}

/// How many jobs waited for a model when they were last counted, and came since: of everybody, or of one owner.
struct Waiting {
    model: String,
    owner: Option<String>,
    count: u64,
    counted: Instant,
}

/// A job that was taken, and the right to finish it.
#[derive(Clone, Debug)]
pub struct Claim {
    /// The job.
    pub job: Job,
    /// What a completion has to name.
    pub lease: String,
}

/// How an attempt ended.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// With a result.
    Completed(Value),
    /// Without one.
    Failed(Failure),
    /// It took longer than its policy allows.
    TimedOut(Failure),
    /// Not at all: the worker stops, or has no room. The attempt does not count.
    Returned,
}

/// A part of a result.
#[derive(Clone, Debug, PartialEq)]
pub struct Chunk {
    /// Its number; the index of a batch's item.
    pub n: i64,
    /// What it says.
    pub body: Value,
}

/// A webhook that is due.
#[derive(Clone, Debug)]
pub struct Delivery {
    /// Its own name.
    pub id: String,
    /// Whose end it tells.
    pub job_id: String,
    /// Where.
    pub url: String,
    /// What.
    pub body: String,
    /// Which try this is.
    pub attempt: i64,
}

impl Store {
    /// Opens the database and brings its tables up to date.
    pub async fn open(options: StoreOptions) -> Result<Store, Error> {
        sqlx::any::install_default_drivers();
        let fail = |error: sqlx::Error| Error::Open(error.to_string());
        let (kind, url, lock) = match postgres(&options.database)? {
            Some(rest) => (Kind::Postgres, format!("postgres://{rest}"), None),
            None => {
                let path = Path::new(&options.database);
                let lock = lock(path)?;
                (Kind::Sqlite, format!("sqlite://{}?mode=rwc", url_path(&options.database)), Some(lock))
            }
        };
        let pages_max = options.bytes_max.map(|bytes| (bytes / 4096).max(16));
        let pool = |connections: u32| {
            AnyPoolOptions::new()
                .max_connections(connections)
                .acquire_timeout(Duration::from_secs(30))
                .after_connect(move |connection, _| {
                    Box::pin(async move {
                        use sqlx::Executor;
                        match kind {
                            Kind::Sqlite => {
                                // FULL: a commit is on the disk before it returns, also in WAL mode.
                                connection.execute("PRAGMA journal_mode = WAL").await?;
                                connection.execute("PRAGMA synchronous = FULL").await?;
                                if let Some(pages) = pages_max {
                                    let pragma = format!("PRAGMA max_page_count = {pages}");
                                    connection.execute(sqlx::AssertSqlSafe(pragma)).await?;
                                }
                            }
                            Kind::Postgres => {
                                connection.execute("SET synchronous_commit = on").await?;
                            }
                        }
                        Ok(())
                    })
                })
        };
        let writer =
            pool(if kind == Kind::Sqlite { 1 } else { CONNECTIONS }).connect(&url).await.map_err(fail)?;
        sqlx::migrate!().run(&writer).await.map_err(|error| Error::Open(error.to_string()))?;
        let reader = match kind {
            Kind::Sqlite => pool(CONNECTIONS).connect(&url).await.map_err(fail)?,
            Kind::Postgres => writer.clone(),
        };
        let clock = Clock::starting(wall_us(kind, &options, &writer).await?, newest_us(&writer).await?);
        let (submissions, submitted) = mpsc::channel(4 * TOGETHER_MAX);
        let inner = Arc::new(Inner {
            kind,
            writer,
            reader,
            clock,
            options,
            submissions,
            queued: Notify::new(),
            released: Notify::new(),
            changes: broadcast::channel(1024).0,
            waiting: Mutex::default(),
            held: Mutex::default(),
            turns: Mutex::default(),
            lock: Mutex::new(lock),
        });
        tokio::spawn(write_together(Arc::downgrade(&inner), submitted, TOGETHER_MAX));
        let store = Store { inner };
        if kind == Kind::Sqlite {
            // Nobody else has the file: whatever was being worked on is not any more.
            for (lease, _) in store.leases().await? {
                store.recover(&lease, None).await?;
            }
        }
        Ok(store)
    }

    /// Accepts a job. When this returns it is on disk.
    pub async fn submit(&self, job: NewJob) -> Result<Submitted, Error> {
        let input = job.input.to_string();
        self.make_room(&job, input.len() as u64).await?;
        let fingerprint = fingerprint(&job);
        let (reply, replied) = oneshot::channel();
        let gone = || Error::Database("the store is closed".to_owned());
        let submission = Submission { id: self.job_id(), fingerprint, input, job, reply };
        self.inner.submissions.send(submission).await.map_err(|_| gone())?;
        let submitted = replied.await.map_err(|_| gone())??;
        if submitted.is_new {
            self.inner.queued.notify_one();
        }
        Ok(submitted)
    }

    /// Refuses when as many wait as may. An owner among others who has some waiting may have more only as long as that is
    /// no more than what is free: a flood of one takes half of the queue.
    pub(crate) async fn make_room(&self, job: &NewJob, bytes: u64) -> Result<(), Error> {
        let max = self.inner.options.queue_max;
        let all = self.waiting(&job.model, None, max).await?;
        if all >= max {
            return Err(Error::QueueFull { waiting: all, max });
        }
        if job.shares {
            let most = (max - all).max(1);
            let own = self.waiting(&job.model, Some(&job.owner), most).await?;
            if own >= most {
                return Err(Error::ShareFull { waiting: own });
            }
            self.hold(&job.owner, bytes).await?;
        }
        Ok(())
    }

    /// Counts this many bytes among those of an owner's jobs, or refuses: what has ended is kept for a while, too, and
    /// the disk is everybody's. What was summed is believed for a second.
    pub(crate) async fn hold(&self, owner: &str, bytes: u64) -> Result<(), Error> {
        let max = self.inner.options.job_bytes_max;
        let add = |held: &mut HashMap<String, (u64, Instant)>, sum: Option<u64>| {
            let known = held.get(owner).filter(|(_, summed)| summed.elapsed() < COUNT_AGE).copied();
            let (sum, summed) = sum.map(|sum| (sum, Instant::now())).or(known)?;
            let all = sum.saturating_add(bytes);
            if all > max {
                return Some(Err(Error::BytesFull { bytes: sum, max }));
            }
            held.insert(owner.to_owned(), (all, summed));
            Some(Ok(()))
        };
        let lock = || self.inner.held.lock().unwrap_or_else(PoisonError::into_inner);
        // A sum that looks full is made again: jobs may have been forgotten.
        if let Some(Ok(())) = add(&mut lock(), None) {
            return Ok(());
        }
        let statement = "SELECT CAST(COALESCE(SUM(bytes), 0) AS BIGINT) AS bytes FROM jobs WHERE owner = $1";
        let row = sqlx::query(statement).bind(owner).fetch_one(&self.inner.reader).await?;
        let sum = u64::try_from(row.try_get::<i64, _>("bytes")?).unwrap_or(0);
        let mut held = lock();
        // What is not believed any more is as good as unknown.
        held.retain(|_, (_, summed)| summed.elapsed() < COUNT_AGE);
        add(&mut held, Some(sum)).unwrap_or(Ok(()))
    }

    /// How many wait; one more is added if that is below `max`. Counting a long queue takes its time, so what came
    /// since is added to the last count, and only a queue that looks full is counted again.
    async fn waiting(&self, model: &str, owner: Option<&str>, max: u64) -> Result<u64, Error> {
        let is_it = |known: &Waiting| known.model == model && known.owner.as_deref() == owner;
        {
            let mut waiting = self.inner.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(known) = waiting.iter_mut().find(|known| is_it(known) && known.count < max) {
                known.count += 1;
                if known.counted.elapsed() < COUNT_AGE {
                    return Ok(known.count - 1);
                }
                // Whoever comes first counts again; the others go by the old count meanwhile.
                known.counted = Instant::now();
            }
        }
        let statement = "SELECT COUNT(*) AS count FROM jobs WHERE model = $1 AND state = 0 AND owner = $2";
        let everybodys = "SELECT COUNT(*) AS count FROM jobs WHERE model = $1 AND state = 0";
        let query = match owner {
            Some(owner) => sqlx::query(statement).bind(model).bind(owner),
            None => sqlx::query(everybodys).bind(model),
        };
        let row = query.fetch_one(&self.inner.reader).await?;
        let count = u64::try_from(row.try_get::<i64, _>("count")?).unwrap_or(0);
        if count < max {
            let mut waiting = self.inner.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            // What is not counted any more is as good as unknown.
            waiting.retain(|known| !is_it(known) && known.counted.elapsed() < 60 * COUNT_AGE);
            waiting.push(Waiting {
                model: model.to_owned(),
                owner: owner.map(str::to_owned),
                count: count + 1,
                counted: Instant::now(),
            });
        }
        Ok(count)
    }

    /// How long results are kept.
    pub(crate) fn retention_us(&self) -> i64 {
        i64::try_from(self.inner.options.retention.as_micros()).unwrap_or(i64::MAX)
    }

    /// How many files an owner may keep, and of how many bytes.
    pub(crate) fn file_bounds(&self) -> (u64, u64) {
        (self.inner.options.files_max, self.inner.options.file_bytes_max)
    }

    /// How many responses an owner may keep, and of how many bytes.
    pub(crate) fn response_bounds(&self) -> (u64, u64) {
        (self.inner.options.responses_max, self.inner.options.response_bytes_max)
    }

    /// Something may have come into the queue.
    pub(crate) fn wake(&self) {
        // A count of a queue that has grown at once is none any more.
        self.inner.waiting.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.inner.queued.notify_waiters();
        self.inner.queued.notify_one();
    }

    /// A name for something that is kept, as a job has; with the whole moment, no two of which are equal, so that lists
    /// in the order of names are in the order of time.
    pub(crate) fn word(&self, kind: &str) -> String {
        format!("{kind}{:014x}{}", self.inner.clock.now_us(), random_word())
    }

    /// A name for a job: its time, then 128 random bits, so that nobody guesses another's. The time comes first because
    /// an index of random names is written all over, every new row on another page.
    fn job_id(&self) -> String {
        let milliseconds = self.inner.clock.now_us() / 1000;
        format!("{milliseconds:012x}{}", random_word())
    }

    /// A job by its id, without what it asks: that may be megabytes, and whoever waits for a job looks at it again and
    /// again.
    pub async fn get(&self, id: &str) -> Result<Option<Job>, Error> {
        let statement = "SELECT id, model, owner, state, priority, CAST('' AS TEXT) AS input, webhook, ttl_ms, \
             execution_timeout_ms, created_us, started_us, finished_us, execution_us, attempts, retries, output, items, \
             route FROM jobs WHERE id = $1";
        let row = sqlx::query(statement).bind(id).fetch_optional(&self.inner.reader).await?;
        Ok(row.as_ref().map(Job::read).transpose()?)
    }

    /// Bytes of what a job answered, which `get` reads.
    pub async fn output_bytes(&self, id: &str) -> Result<usize, Error> {
        let statement =
            "SELECT CAST(COALESCE(OCTET_LENGTH(output), 0) AS BIGINT) AS bytes FROM jobs WHERE id = $1";
        let row = sqlx::query(statement).bind(id).fetch_optional(&self.inner.reader).await?;
        let bytes = row.map(|row| row.try_get::<i64, _>("bytes")).transpose()?;
        Ok(usize::try_from(bytes.unwrap_or(0)).unwrap_or(0))
    }

    /// The newest jobs of a model: those of one owner and in one state, if these are given. Without inputs and results,
    /// which may be large.
    pub async fn list(
        &self,
        model: &str,
        owner: Option<&str>,
        state: Option<State>,
        most: i64,
    ) -> Result<Vec<Job>, Error> {
        let statement = "SELECT id, model, owner, state, priority, CAST('' AS TEXT) AS input, webhook, ttl_ms, \
             execution_timeout_ms, created_us, started_us, finished_us, execution_us, attempts, retries, \
             CASE WHEN state = 2 THEN NULL ELSE output END AS output, items, route FROM jobs WHERE model = $1 \
             AND route IS NULL AND ($2 = '' OR owner = $2) AND ($3 < 0 OR state = $3) ORDER BY created_us DESC LIMIT $4";
        let state = state.map_or(-1, State::number);
        let rows = sqlx::query(statement).bind(model).bind(owner.unwrap_or_default()).bind(state).bind(most);
        let rows = rows.fetch_all(&self.inner.reader).await?;
        Ok(rows.iter().map(Job::read).collect::<Result<_, _>>()?)
    }

    /// What became of a job so far.
    pub async fn timeline(&self, id: &str) -> Result<Vec<TimelineEvent>, Error> {
        let statement = "SELECT at_us, event, attempt, detail FROM events WHERE job_id = $1 ORDER BY at_us";
        let rows = sqlx::query(statement).bind(id).fetch_all(&self.inner.reader).await?;
        let read = |row: &AnyRow| {
            Ok(TimelineEvent {
                at_us: row.try_get("at_us")?,
                event: row.try_get("event")?,
                attempt: row.try_get("attempt")?,
                detail: row.try_get("detail")?,
            })
        };
        Ok(rows.iter().map(read).collect::<Result<_, sqlx::Error>>()?)
    }

    /// How a model's jobs stand.
    pub async fn counts(&self, model: &str) -> Result<Counts, Error> {
        let mut counts = Counts::default();
        let statement = "SELECT state, COUNT(*) AS count FROM jobs WHERE model = $1 GROUP BY state";
        for row in sqlx::query(statement).bind(model).fetch_all(&self.inner.reader).await? {
            let state = State::numbered(row.try_get("state")?);
            for (other, count) in State::ALL.into_iter().zip(&mut counts.by_state) {
                if other == state {
                    *count = row.try_get("count")?;
                }
            }
        }
        let statement = "SELECT COUNT(*) AS count FROM jobs WHERE model = $1 AND attempts + retries > 1";
        let row = sqlx::query(statement).bind(model).fetch_one(&self.inner.reader).await?;
        counts.retried = row.try_get("count")?;
        Ok(counts)
    }

    /// Workers that have a job of a model.
    pub async fn busy_workers(&self, model: &str) -> Result<i64, Error> {
        let statement = "SELECT COUNT(DISTINCT worker) AS count FROM jobs WHERE model = $1 AND state = 1";
        let row = sqlx::query(statement).bind(model).fetch_one(&self.inner.reader).await?;
        Ok(row.try_get("count")?)
    }

    /// Takes the next job: important before unimportant; of the owner with the fewest under way, and of those whose
    /// last turn is the longest ago; the oldest. Nobody else gets it.
    pub async fn claim(&self, model: &str, worker: &str) -> Result<Option<Claim>, Error> {
        for owner in self.owners_in_turn(model).await? {
            if let Some(claim) = self.claim_of(model, &owner, worker).await? {
                let mut turns = self.inner.turns.lock().unwrap_or_else(PoisonError::into_inner);
                let last = turns.values().max().copied().unwrap_or(0);
                turns.insert((model.to_owned(), owner), last + 1);
                return Ok(Some(claim));
            }
        }
        Ok(None)
    }

    /// Whose jobs wait for a model, whoever is next first.
    async fn owners_in_turn(&self, model: &str) -> Result<Vec<String>, Error> {
        // From one owner to the next by the index, past all their jobs.
        let statement = "WITH RECURSIVE owners (owner) AS (\
             SELECT MIN(owner) FROM jobs WHERE model = $1 AND state = 0 UNION ALL \
             SELECT (SELECT MIN(jobs.owner) FROM jobs WHERE jobs.model = $1 AND jobs.state = 0 \
             AND jobs.owner > owners.owner) FROM owners WHERE owners.owner IS NOT NULL) \
             SELECT owner FROM owners WHERE owner IS NOT NULL";
        let rows = sqlx::query(statement).bind(model).fetch_all(&self.inner.reader).await?;
        let owners: Vec<String> = rows.iter().map(|row| row.try_get("owner")).collect::<Result<_, _>>()?;
        if owners.len() < 2 {
            return Ok(owners);
        }
        let statement =
            "SELECT owner, COUNT(*) AS count FROM jobs WHERE model = $1 AND state = 1 GROUP BY owner";
        let mut running = HashMap::new();
        for row in sqlx::query(statement).bind(model).fetch_all(&self.inner.reader).await? {
            running.insert(row.try_get::<String, _>("owner")?, row.try_get::<i64, _>("count")?);
        }
        let now = self.inner.clock.now_us();
        let mut ranked = Vec::new();
        for owner in owners {
            let statement = "SELECT priority FROM jobs WHERE model = $1 AND owner = $2 AND state = 0 \
                 AND not_before_us <= $3 AND expires_us > $3 ORDER BY priority, created_us, id LIMIT 1";
            let first = sqlx::query(statement).bind(model).bind(&owner).bind(now);
            let Some(first) = first.fetch_optional(&self.inner.reader).await? else { continue };
            let running = running.get(&owner).copied().unwrap_or(0);
            ranked.push((first.try_get::<i64, _>("priority")?, running, owner));
        }
        let mut turns = self.inner.turns.lock().unwrap_or_else(PoisonError::into_inner);
        // Owners whose jobs are all done are forgotten.
        turns.retain(|(other, owner), _| other != model || ranked.iter().any(|(.., waits)| waits == owner));
        let turn = |owner: &String| turns.get(&(model.to_owned(), owner.clone())).copied().unwrap_or(0);
        ranked.sort_by_cached_key(|(priority, running, owner)| (*priority, *running, turn(owner)));
        Ok(ranked.into_iter().map(|(.., owner)| owner).collect())
    }

    async fn claim_of(&self, model: &str, owner: &str, worker: &str) -> Result<Option<Claim>, Error> {
        macro_rules! claim {
            ($lock:literal) => {
                concat!(
                    "UPDATE jobs SET state = 1, attempts = attempts + 1, lease = $1, worker = $2, beat = 0, \
                     started_us = $3, execution_us = 0 WHERE id = (SELECT id FROM jobs WHERE model = $4 AND state = 0 \
                     AND owner = $5 AND not_before_us <= $3 AND expires_us > $3 \
                     ORDER BY priority, created_us, id LIMIT 1",
                    $lock,
                    ") AND state = 0 RETURNING ",
                    columns!()
                )
            };
        }
        let statement = match self.inner.kind {
            Kind::Sqlite => claim!(""),
            // Others skip what is being taken instead of waiting for it.
            Kind::Postgres => claim!(" FOR UPDATE SKIP LOCKED"),
        };
        let (lease, now) = (random_word(), self.inner.clock.now_us());
        let mut change = self.inner.writer.begin().await?;
        let row = sqlx::query(statement).bind(&lease).bind(worker).bind(now).bind(model).bind(owner);
        let Some(row) = row.fetch_optional(&mut *change).await? else { return Ok(None) };
        let job = Job::read(&row)?;
        // What an attempt before this one said is not part of this one's answer; finished items of a batch are.
        let texts = sqlx::query("DELETE FROM chunks WHERE job_id = $1 AND item = 0").bind(&job.id);
        if texts.execute(&mut *change).await?.rows_affected() > 0 {
            sqlx::query("UPDATE jobs SET streamed = 0 WHERE id = $1")
                .bind(&job.id)
                .execute(&mut *change)
                .await?;
        }
        self.event(&mut change, &job, "started", Some(worker)).await?;
        change.commit().await?;
        self.changed(&job.id);
        Ok(Some(Claim { job, lease }))
    }

    /// Shows that a worker lives. Returns the leases that it still holds: what it works on under another is not its any
    /// more.
    pub async fn beat(&self, worker: &str) -> Result<Vec<String>, Error> {
        let statement = "UPDATE jobs SET beat = beat + 1 WHERE worker = $1 AND state = 1 RETURNING lease";
        let rows = sqlx::query(statement).bind(worker).fetch_all(&self.inner.writer).await?;
        Ok(rows.iter().map(|row| row.try_get("lease")).collect::<Result<_, _>>()?)
    }

    /// Ends an attempt. `false` if the lease is not held any more: then nothing changes.
    pub async fn finish(&self, claim: &Claim, outcome: Outcome, execution: Duration) -> Result<bool, Error> {
        let (attempt, max) = (claim.job.attempts, self.inner.options.attempts_max);
        let executed = Some(i64::try_from(execution.as_micros()).unwrap_or(i64::MAX));
        let guard = Guard::Lease(&claim.lease);
        let ended = |state, output: Value, event, detail| End {
            state,
            output: Some(output.to_string()),
            event,
            detail,
            executed,
            pause_us: 0,
            uncounted: false,
        };
        let end = match outcome {
            Outcome::Completed(output) => ended(State::Completed, output, "completed", None),
            Outcome::TimedOut(failure) => {
                ended(State::TimedOut, failure.envelope(attempt), "timed out", Some(failure.code.name()))
            }
            Outcome::Failed(failure) if failure.retryable && attempt < max => {
                let doublings = u32::try_from(attempt.saturating_sub(1)).unwrap_or(0).min(10);
                let asked = i64::from(failure.retry_after_s.unwrap_or(0)) * 1_000_000;
                let pause_us = (RETRY_PAUSE_US << doublings).max(asked);
                End { pause_us, ..End::queued("failed, to be tried again", Some(failure.code.name())) }
            }
            Outcome::Failed(failure) => {
                ended(State::Failed, failure.envelope(attempt), "failed", Some(failure.code.name()))
            }
            Outcome::Returned => {
                End { uncounted: true, pause_us: RETRY_PAUSE_US, ..End::queued("returned", None) }
            }
        };
        Ok(self.end(guard, end).await?.is_some())
    }

    /// Keeps a part of a result. `false` if the lease is not held any more.
    pub async fn add_chunk(&self, claim: &Claim, chunk: &Chunk, is_item: bool) -> Result<bool, Error> {
        let mut change = self.inner.writer.begin().await?;
        // Touching the row keeps the lease from going elsewhere until this is written.
        let held = sqlx::query("UPDATE jobs SET beat = beat + 1 WHERE id = $1 AND lease = $2 AND state = 1");
        let held = held.bind(&claim.job.id).bind(&claim.lease).execute(&mut *change).await?;
        if held.rows_affected() == 0 {
            return Ok(false);
        }
        let statement =
            "INSERT INTO chunks (job_id, n, item, body) VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING";
        let insert = sqlx::query(statement).bind(&claim.job.id).bind(chunk.n).bind(i64::from(is_item));
        insert.bind(chunk.body.to_string()).execute(&mut *change).await?;
        change.commit().await?;
        self.changed(&claim.job.id);
        Ok(true)
    }

    /// The parts of a result from a number on, as far as there is no gap: items of a batch may be done out of order and
    /// are shown in it.
    pub async fn chunks(&self, id: &str, from: i64) -> Result<Vec<Chunk>, Error> {
        let rows = sqlx::query(CHUNKS).bind(id).bind(from).fetch_all(&self.inner.reader).await?;
        unbroken(&rows, from)
    }

    /// The finished items of a batch, also behind gaps.
    pub async fn finished_items(&self, id: &str) -> Result<Vec<Chunk>, Error> {
        let statement = "SELECT n, body FROM chunks WHERE job_id = $1 AND item = 1 ORDER BY n";
        let rows = sqlx::query(statement).bind(id).fetch_all(&self.inner.reader).await?;
        rows.iter().map(read_chunk).collect()
    }

    /// How many items of a batch are finished.
    pub async fn items_done(&self, id: &str) -> Result<i64, Error> {
        let statement = "SELECT COUNT(*) AS count FROM chunks WHERE job_id = $1 AND item = 1";
        Ok(sqlx::query(statement).bind(id).fetch_one(&self.inner.reader).await?.try_get("count")?)
    }

    /// The parts that were not handed out by this before: each is handed out once, as RunPod's clients expect.
    pub async fn take_chunks(&self, id: &str) -> Result<Vec<Chunk>, Error> {
        let mut change = self.inner.writer.begin().await?;
        // Touching the row first lets two askers follow each other.
        let statement = "UPDATE jobs SET streamed = streamed WHERE id = $1 RETURNING streamed";
        let Some(row) = sqlx::query(statement).bind(id).fetch_optional(&mut *change).await? else {
            return Ok(Vec::new());
        };
        let streamed: i64 = row.try_get("streamed")?;
        let rows = sqlx::query(CHUNKS).bind(id).bind(streamed).fetch_all(&mut *change).await?;
        let chunks = unbroken(&rows, streamed)?;
        if chunks.is_empty() {
            return Ok(chunks);
        }
        let statement = "UPDATE jobs SET streamed = $2 WHERE id = $1";
        let taken = streamed + i64::try_from(chunks.len()).unwrap_or(0);
        sqlx::query(statement).bind(id).bind(taken).execute(&mut *change).await?;
        change.commit().await?;
        Ok(chunks)
    }

    /// Cancels a job that waits or is worked on; one that has ended stays as it is. Returns how it stands then.
    pub async fn cancel(&self, id: &str) -> Result<Job, Error> {
        let job = self.get(id).await?.ok_or(Error::NotFound)?;
        let failure = Failure::new(Code::Cancelled, "queue", "the job was cancelled");
        let output = failure.envelope(job.attempts).to_string();
        match self.end(Guard::Open(id), End::stopped(State::Cancelled, output, "cancelled", None)).await? {
            Some(cancelled) => {
                self.inner.released.notify_one();
                Ok(cancelled)
            }
            None => self.get(id).await?.ok_or(Error::NotFound),
        }
    }

    /// Queues a job again that failed or timed out, with all its attempts before it.
    pub async fn retry(&self, id: &str) -> Result<Job, Error> {
        let now = self.inner.clock.now_us();
        let mut change = self.inner.writer.begin().await?;
        let statement = concat!(
            "UPDATE jobs SET state = 0, attempts = 0, retries = retries + 1, created_us = $2, not_before_us = $2, \
             expires_us = CASE WHEN ttl_ms IS NULL THEN expires_us ELSE $2 + ttl_ms * 1000 END, started_us = NULL, \
             finished_us = NULL, execution_us = 0, lease = NULL, worker = NULL, streamed = 0, output = NULL \
             WHERE id = $1 AND state IN (3, 5) RETURNING ",
            columns!()
        );
        let row = sqlx::query(statement).bind(id).bind(now).fetch_optional(&mut *change).await?;
        let Some(row) = row else {
            drop(change);
            let state = self.get(id).await?.ok_or(Error::NotFound)?.state;
            return Err(Error::WrongState { state, wanted: "only a failed or timed out job can be retried" });
        };
        let job = Job::read(&row)?;
        // Failed items of a batch are asked again with the rest.
        sqlx::query("DELETE FROM chunks WHERE job_id = $1").bind(id).execute(&mut *change).await?;
        self.event(&mut change, &job, "retried", None).await?;
        change.commit().await?;
        self.changed(id);
        self.inner.queued.notify_one();
        Ok(job)
    }

    /// Cancels everything of an owner that waits for a model. Returns how many did.
    pub async fn purge(&self, model: &str, owner: &str) -> Result<u64, Error> {
        let mut removed = 0;
        loop {
            let statement = "SELECT id FROM jobs WHERE model = $1 AND owner = $2 AND state = 0 LIMIT $3";
            let rows = sqlx::query(statement).bind(model).bind(owner).bind(SWEEP_MAX);
            let rows = rows.fetch_all(&self.inner.reader).await?;
            let failure = Failure::new(Code::Cancelled, "queue", "the queue was purged");
            let mut some = false;
            for row in &rows {
                let id: String = row.try_get("id")?;
                let end = End::stopped(State::Cancelled, failure.envelope(0).to_string(), "purged", None);
                some |= self.end(Guard::Queued(&id), end).await?.is_some_and(|_| {
                    removed += 1;
                    true
                });
            }
            if !some {
                return Ok(removed);
            }
        }
    }

    /// Every lease that is held, with its last sign of life.
    pub async fn leases(&self) -> Result<Vec<(String, i64)>, Error> {
        let rows =
            sqlx::query("SELECT lease, beat FROM jobs WHERE state = 1").fetch_all(&self.inner.reader).await?;
        let read = |row: &AnyRow| Ok((row.try_get("lease")?, row.try_get("beat")?));
        Ok(rows.iter().map(read).collect::<Result<_, sqlx::Error>>()?)
    }

    /// Takes a lease from a worker that is gone, if it gave no sign of life since `beat`. The job waits again, or has
    /// had its attempts. Returns whether the lease was taken.
    pub async fn recover(&self, lease: &str, beat: Option<i64>) -> Result<bool, Error> {
        let max = self.inner.options.attempts_max;
        let message = format!("the worker was lost in each of {max} attempts");
        let failure = Failure::retryable(Code::AttemptsExhausted, "generate", message);
        let output = failure.envelope(max).to_string();
        let exhausted = End::stopped(State::Failed, output, "failed", Some(failure.code.name()));
        let guard = |exhausted| Guard::Lost { lease, beat, attempts_max: max, exhausted };
        let lost = self.end(guard(true), exhausted).await?.is_some();
        Ok(lost
            || self.end(guard(false), End::queued("worker lost, to be tried again", None)).await?.is_some())
    }

    /// Times out what waited too long, and forgets what ended long ago.
    pub async fn sweep(&self) -> Result<(), Error> {
        let now = self.inner.clock.now_us();
        let statement = "SELECT id FROM jobs WHERE state = 0 AND expires_us <= $1 LIMIT $2";
        for row in sqlx::query(statement).bind(now).bind(SWEEP_MAX).fetch_all(&self.inner.reader).await? {
            let id: String = row.try_get("id")?;
            let failure = Failure::retryable(Code::TtlExpired, "queue", "the job waited longer than its ttl");
            let output = failure.envelope(0).to_string();
            let end = End::stopped(State::TimedOut, output, "timed out", Some(failure.code.name()));
            self.end(Guard::Queued(&id), end).await?;
        }
        self.sweep_files().await?;
        self.sweep_batches().await?;
        self.sweep_responses().await?;
        let before = now.saturating_sub(self.retention_us());
        let mut change = self.inner.writer.begin().await?;
        let statement =
            "SELECT id FROM jobs WHERE finished_us < $1 AND batch IS NULL AND route IS NULL LIMIT $2";
        for row in sqlx::query(statement).bind(before).bind(SWEEP_MAX).fetch_all(&mut *change).await? {
            let id: String = row.try_get("id")?;
            for statement in [
                "DELETE FROM events WHERE job_id = $1",
                "DELETE FROM chunks WHERE job_id = $1",
                "DELETE FROM outbox WHERE job_id = $1 AND state <> 0",
                "DELETE FROM jobs WHERE id = $1",
            ] {
                sqlx::query(statement).bind(&id).execute(&mut *change).await?;
            }
        }
        change.commit().await?;
        Ok(())
    }

    /// Registers a schema under a name of its owner's; a later one takes its place for later jobs.
    pub async fn put_schema(
        &self,
        model: &str,
        owner: &str,
        name: &str,
        schema: &Value,
    ) -> Result<(), Error> {
        let statement =
            "SELECT COUNT(*) AS count FROM schemas WHERE model = $1 AND owner = $2 AND name <> $3";
        let row = sqlx::query(statement).bind(model).bind(owner).bind(name);
        let row = row.fetch_one(&self.inner.reader).await?;
        if u64::try_from(row.try_get::<i64, _>("count")?).unwrap_or(0) >= SCHEMAS_MAX {
            return Err(Error::SchemasFull { max: SCHEMAS_MAX });
        }
        let statement = "INSERT INTO schemas (model, owner, name, body, registered_us) VALUES ($1, $2, $3, $4, $5) \
             ON CONFLICT (model, owner, name) DO UPDATE SET body = excluded.body, registered_us = excluded.registered_us";
        let insert = sqlx::query(statement).bind(model).bind(owner).bind(name).bind(schema.to_string());
        insert.bind(self.inner.clock.now_us()).execute(&self.inner.writer).await?;
        Ok(())
    }

    /// A schema of an owner's, or one that was registered before schemas had owners.
    pub async fn schema(&self, model: &str, owner: &str, name: &str) -> Result<Option<Value>, Error> {
        let statement = "SELECT body FROM schemas WHERE model = $1 AND owner IN ($2, '') AND name = $3 \
             ORDER BY owner DESC LIMIT 1";
        let row = sqlx::query(statement).bind(model).bind(owner).bind(name);
        let row = row.fetch_optional(&self.inner.reader).await?;
        let Some(row) = row else { return Ok(None) };
        let body: String = row.try_get("body")?;
        serde_json::from_str(&body).map(Some).map_err(|error| Error::Database(error.to_string()))
    }

    /// A webhook that is due, if there is one. It is due again after `pause`, so a sender that dies delays it and loses
    /// nothing.
    pub async fn next_delivery(&self, pause: impl Fn(i64) -> Duration) -> Result<Option<Delivery>, Error> {
        let now = self.inner.clock.now_us();
        let statement = match self.inner.kind {
            Kind::Sqlite => {
                "SELECT id, job_id, url, body, attempts FROM outbox WHERE state = 0 AND next_us <= $1 \
                 ORDER BY next_us LIMIT 1"
            }
            Kind::Postgres => {
                "SELECT id, job_id, url, body, attempts FROM outbox WHERE state = 0 AND next_us <= $1 \
                 ORDER BY next_us LIMIT 1 FOR UPDATE SKIP LOCKED"
            }
        };
        let mut change = self.inner.writer.begin().await?;
        let row = sqlx::query(statement).bind(now).fetch_optional(&mut *change).await?;
        let Some(row) = row else { return Ok(None) };
        let attempt = row.try_get::<i64, _>("attempts")? + 1;
        let delivery = Delivery {
            id: row.try_get("id")?,
            job_id: row.try_get("job_id")?,
            url: row.try_get("url")?,
            body: row.try_get("body")?,
            attempt,
        };
        let next = now.saturating_add(i64::try_from(pause(attempt).as_micros()).unwrap_or(i64::MAX));
        let update = sqlx::query("UPDATE outbox SET attempts = $2, next_us = $3 WHERE id = $1");
        update.bind(&delivery.id).bind(attempt).bind(next).execute(&mut *change).await?;
        change.commit().await?;
        Ok(Some(delivery))
    }

    /// Webhooks that are not told and not given up.
    pub async fn deliveries_waiting(&self) -> Result<i64, Error> {
        let statement = "SELECT COUNT(*) AS count FROM outbox WHERE state = 0";
        Ok(sqlx::query(statement).fetch_one(&self.inner.reader).await?.try_get("count")?)
    }

    /// A webhook arrived, or will not be tried again.
    pub async fn end_delivery(&self, delivery: &Delivery, arrived: bool) -> Result<(), Error> {
        let mut change = self.inner.writer.begin().await?;
        let update = sqlx::query("UPDATE outbox SET state = $2 WHERE id = $1 AND state = 0");
        let update =
            update.bind(&delivery.id).bind(if arrived { 1i64 } else { 2 }).execute(&mut *change).await?;
        if update.rows_affected() > 0 {
            let event = if arrived { "webhook delivered" } else { "webhook given up" };
            self.note(&mut change, &delivery.job_id, event, delivery.attempt, None).await?;
        }
        change.commit().await?;
        Ok(())
    }

    /// Resolves when a job may have come into the queue.
    pub async fn queued(&self) {
        self.inner.queued.notified().await;
    }

    /// Resolves when a job was taken from who works on it, in this process.
    pub async fn released(&self) {
        self.inner.released.notified().await;
    }

    /// Ids of jobs as they change, in this process.
    pub fn changes(&self) -> broadcast::Receiver<Arc<str>> {
        self.inner.changes.subscribe()
    }

    /// How many jobs may wait.
    pub fn queue_max(&self) -> u64 {
        self.inner.options.queue_max
    }

    /// Closes the database. What is being written is written first.
    pub async fn close(&self) {
        self.inner.writer.close().await;
        self.inner.reader.close().await;
        // Whoever still holds the store can do nothing with it; others may have the file.
        drop(self.inner.lock.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    /// The one way out of a state: the row if the guard still holds, its event, and its webhook if it has ended.
    async fn end(&self, guard: Guard<'_>, end: End) -> Result<Option<Job>, Error> {
        macro_rules! end {
            ($guard:literal) => {
                concat!(
                    "UPDATE jobs SET state = $2, output = $3, finished_us = $4, not_before_us = $5, \
                     attempts = attempts - $6, execution_us = CASE WHEN $7 < 0 THEN execution_us ELSE $7 END, \
                     lease = NULL, worker = NULL WHERE ",
                    $guard,
                    " RETURNING ",
                    columns!()
                )
            };
        }
        let now = self.inner.clock.now_us();
        let (name, statement) = match &guard {
            Guard::Lease(lease) => (*lease, end!("lease = $1 AND state = 1")),
            Guard::Open(id) => (*id, end!("id = $1 AND state IN (0, 1)")),
            Guard::Queued(id) => (*id, end!("id = $1 AND state = 0")),
            Guard::Lost { lease, exhausted: true, .. } => {
                (*lease, end!("lease = $1 AND state = 1 AND ($8 < 0 OR beat = $8) AND attempts >= $9"))
            }
            Guard::Lost { lease, exhausted: false, .. } => {
                (*lease, end!("lease = $1 AND state = 1 AND ($8 < 0 OR beat = $8) AND attempts < $9"))
            }
        };
        let mut change = self.inner.writer.begin().await?;
        let mut update = sqlx::query(statement)
            .bind(name)
            .bind(end.state.number())
            .bind(&end.output)
            .bind(end.state.is_final().then_some(now))
            .bind(now.saturating_add(end.pause_us))
            .bind(i64::from(end.uncounted))
            .bind(end.executed.unwrap_or(-1));
        if let Guard::Lost { beat, attempts_max, .. } = &guard {
            update = update.bind(beat.unwrap_or(-1)).bind(*attempts_max);
        }
        let Some(row) = update.fetch_optional(&mut *change).await? else { return Ok(None) };
        let job = Job::read(&row)?;
        self.event(&mut change, &job, end.event, end.detail).await?;
        if let (true, Some(url)) = (end.state.is_final(), &job.webhook) {
            let statement = "INSERT INTO outbox (id, job_id, url, body, state, attempts, next_us) \
                 VALUES ($1, $2, $3, $4, 0, 0, $5)";
            let insert = sqlx::query(statement).bind(random_word()).bind(&job.id).bind(url);
            insert.bind(job.status().to_string()).bind(now).execute(&mut *change).await?;
        }
        change.commit().await?;
        self.changed(&job.id);
        if !end.state.is_final() {
            self.inner.queued.notify_one();
        }
        Ok(Some(job))
    }

    async fn event(
        &self,
        change: &mut Transaction<'_, Any>,
        job: &Job,
        event: &str,
        detail: Option<&str>,
    ) -> Result<(), Error> {
        self.note(change, &job.id, event, job.attempts, detail).await
    }

    pub(crate) async fn note(
        &self,
        change: &mut Transaction<'_, Any>,
        id: &str,
        event: &str,
        attempt: i64,
        detail: Option<&str>,
    ) -> Result<(), Error> {
        let statement =
            "INSERT INTO events (job_id, at_us, event, attempt, detail) VALUES ($1, $2, $3, $4, $5)";
        let insert =
            sqlx::query(statement).bind(id).bind(self.inner.clock.now_us()).bind(event).bind(attempt);
        insert.bind(detail).execute(&mut **change).await?;
        Ok(())
    }

    fn changed(&self, id: &str) {
        // Nobody has to listen.
        drop(self.inner.changes.send(id.into()));
    }
}

/// Whose row may change.
enum Guard<'a> {
    /// The worker's that holds this lease.
    Lease(&'a str),
    /// A job's that has not ended.
    Open(&'a str),
    /// A job's that waits.
    Queued(&'a str),
    /// The one of a worker that is gone.
    Lost { lease: &'a str, beat: Option<i64>, attempts_max: i64, exhausted: bool },
}

/// How a row changes.
struct End {
    state: State,
    output: Option<String>,
    event: &'static str,
    detail: Option<&'static str>,
    executed: Option<i64>,
    /// Before it may be taken again.
    pause_us: i64,
    /// The attempt was none.
    uncounted: bool,
}

impl End {
    fn stopped(state: State, output: String, event: &'static str, detail: Option<&'static str>) -> End {
        End { state, output: Some(output), event, detail, executed: None, pause_us: 0, uncounted: false }
    }

    fn queued(event: &'static str, detail: Option<&'static str>) -> End {
        End {
            state: State::Queued,
            output: None,
            event,
            detail,
            executed: None,
            pause_us: 0,
            uncounted: false,
        }
    }
}

/// Parts from a number on; more than a batch has items.
const CHUNKS: &str = "SELECT n, body FROM chunks WHERE job_id = $1 AND n >= $2 ORDER BY n LIMIT 8192";

fn unbroken(rows: &[AnyRow], from: i64) -> Result<Vec<Chunk>, Error> {
    let chunks: Vec<Chunk> = rows.iter().map(read_chunk).collect::<Result<_, _>>()?;
    let in_order = (from..).zip(chunks).take_while(|(n, chunk)| *n == chunk.n);
    Ok(in_order.map(|(_, chunk)| chunk).collect())
}

fn read_chunk(row: &AnyRow) -> Result<Chunk, Error> {
    let body: String = row.try_get("body")?;
    let body = serde_json::from_str(&body).unwrap_or_else(|_| json!(body));
    Ok(Chunk { n: row.try_get("n")?, body })
}

/// Marks SQLite's file as ours, beside it: two processes that both believe to be alone would take each other's jobs.
fn lock(database: &Path) -> Result<File, Error> {
    let path = PathBuf::from(format!("{}.lock", database.display()));
    let fail = |error: std::io::Error| Error::Open(format!("{}: {error}", path.display()));
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(fail)?;
    }
    let file = private().open(&path).map_err(fail)?;
    // Prompts and answers are in it: SQLite gives its own files the rights of this one, which it finds.
    private().open(database).map_err(|error| Error::Open(format!("{}: {error}", database.display())))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(fs::TryLockError::WouldBlock) => Err(Error::InUse { path }),
        Err(fs::TryLockError::Error(error)) => Err(fail(error)),
    }
}

/// Makes a file that its owner alone can read, or opens the one that is there.
fn private() -> fs::OpenOptions {
    let mut options = File::options();
    options.create(true).truncate(false).write(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options
}

/// What follows `postgres://` in a database's address; `None` of a path. Anything else that looks like an address is
/// refused: as a path it would become a file whose name holds a password.
fn postgres(database: &str) -> Result<Option<&str>, Error> {
    let Some((scheme, rest)) = database.split_once("://") else { return Ok(None) };
    match scheme.to_ascii_lowercase().as_str() {
        "postgres" | "postgresql" => Ok(Some(rest)),
        _ => {
            let scheme: String = scheme.chars().take(32).collect();
            Err(Error::Open(format!("{scheme}:// is not supported: give a path or postgres://...")))
        }
    }
}

/// The path as part of a URL.
fn url_path(path: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-~".contains(&byte);
    path.bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

/// The time of day: the database's where several machines share it.
async fn wall_us(kind: Kind, options: &StoreOptions, pool: &AnyPool) -> Result<i64, Error> {
    if let Some(wall) = options.wall_us {
        return Ok(wall);
    }
    match kind {
        Kind::Sqlite => {
            let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            Ok(i64::try_from(since.as_micros()).unwrap_or(0))
        }
        Kind::Postgres => {
            let statement = "SELECT CAST(EXTRACT(EPOCH FROM now()) * 1000000 AS BIGINT) AS now";
            Ok(sqlx::query(statement).fetch_one(pool).await?.try_get("now")?)
        }
    }
}

/// The newest moment that was stored.
async fn newest_us(pool: &AnyPool) -> Result<i64, Error> {
    let statement = "SELECT created_us FROM jobs ORDER BY created_us DESC LIMIT 1";
    let row = sqlx::query(statement).fetch_optional(pool).await?;
    Ok(row.map(|row| row.try_get("created_us")).transpose()?.unwrap_or(0))
}

/// 128 random bits in hexadecimal: nobody guesses another's.
pub(crate) fn random_word() -> String {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).expect("the operating system has random numbers");
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
