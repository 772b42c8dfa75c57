//! A file of requests, worked on as jobs: each line is a job of its own, and the answers of all are written to a file
//! once the last has ended.
//!
//! A batch and its jobs come into being in one transaction. In another one its answers are written down, and the jobs,
//! which nobody needs any more, are forgotten. So whenever a worker dies, every line is answered once: by its job or in
//! the file.

use serde_json::Value;
use sha2::{Digest, Sha256};
use sqlx::{Row, any::AnyRow};

use crate::{Error, Page, State, Store, file::FileWriter};

/// Requests of one batch, as many as OpenAI takes.
pub const BATCH_REQUESTS_MAX: usize = 50_000;

/// Batches of one owner that are kept, those that have ended included.
const BATCHES_MAX: u64 = 1000;

/// Answers read at once.
const READ_TOGETHER: i64 = 64;

/// Batches that are ended by one call.
const SETTLE_MAX: i64 = 16;

/// A batch to be begun.
#[derive(Clone, Debug)]
pub struct NewBatch {
    /// Whose it is; nobody else sees it.
    pub owner: String,
    /// Which route answers all its requests.
    pub route: String,
    /// The file that they came from.
    pub input_file: String,
    /// How long they may wait, as it was asked for.
    pub completion_window: String,
    /// The same in microseconds.
    pub window_us: i64,
    /// Its owner's own notes.
    pub metadata: Value,
    /// What is asked.
    pub requests: Vec<BatchRequest>,
    /// What is wrong with the file. Then the batch has failed, and nothing of it is asked.
    pub errors: Vec<Value>,
    /// Whether its owner shares the queue with others, who are left room in it.
    pub shares: bool,
    /// Beginning again under the same key is the same batch.
    pub idempotency_key: Option<String>,
}

/// A line of a batch.
#[derive(Clone, Debug)]
pub struct BatchRequest {
    /// Whose queue it joins.
    pub model: String,
    /// What its owner calls it.
    pub custom_id: String,
    /// The JSON text of what is asked.
    pub body: String,
}

/// Where a batch is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchState {
    /// Its requests wait or are answered.
    InProgress,
    /// Somebody did not want it any more; what was answered is about to be written down.
    Cancelling,
    /// Every request has an answer or an error.
    Completed,
    /// Its file was wrong.
    Failed,
    /// Some requests waited too long.
    Expired,
    /// It was cancelled, and what was answered is written down.
    Cancelled,
}

impl BatchState {
    const ALL: [BatchState; 6] = [
        BatchState::InProgress,
        BatchState::Cancelling,
        BatchState::Completed,
        BatchState::Failed,
        BatchState::Expired,
        BatchState::Cancelled,
    ];

    /// As it is written on the wire.
    pub fn name(self) -> &'static str {
        match self {
            BatchState::InProgress => "in_progress",
            BatchState::Cancelling => "cancelling",
            BatchState::Completed => "completed",
            BatchState::Failed => "failed",
            BatchState::Expired => "expired",
            BatchState::Cancelled => "cancelled",
        }
    }

    fn number(self) -> i64 {
        BatchState::ALL.iter().zip(0..).find(|(state, _)| **state == self).map_or(3, |(_, number)| number)
    }

    fn numbered(number: i64) -> BatchState {
        BatchState::ALL
            .into_iter()
            .zip(0..)
            .find(|(_, own)| *own == number)
            .map_or(BatchState::Failed, |(s, _)| s)
    }
}

/// A batch as it is kept.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    /// Unguessable; later ones sort behind earlier ones.
    pub id: String,
    /// Whose it is.
    pub owner: String,
    /// Which route answers its requests.
    pub route: String,
    /// The file that they came from.
    pub input_file: String,
    /// How long they may wait, as it was asked for.
    pub completion_window: String,
    /// Its owner's own notes.
    pub metadata: Value,
    /// Where it is.
    pub state: BatchState,
    /// What was wrong with the file.
    pub errors: Vec<Value>,
    /// How many requests it has.
    pub requests: i64,
    /// Of those, how many are answered.
    pub completed: i64,
    /// And how many have failed.
    pub failed: i64,
    /// Where the answers are.
    pub output_file: Option<String>,
    /// Where the errors are.
    pub error_file: Option<String>,
    /// When it began, in microseconds.
    pub created_us: i64,
    /// When what still waits has failed.
    pub expires_us: i64,
    /// When it was cancelled.
    pub cancelling_us: Option<i64>,
    /// When it ended.
    pub ended_us: Option<i64>,
}

const BATCH: &str = "id, owner, route, input_file, completion_window, metadata, state, errors, requests, completed, \
     failed, output_file, error_file, created_us, expires_us, cancelling_us, ended_us";

impl Batch {
    fn read(row: &AnyRow) -> Result<Batch, sqlx::Error> {
        let json = |text: String| serde_json::from_str(&text).unwrap_or(Value::Null);
        let errors = row.try_get::<Option<String>, _>("errors")?.map(json);
        Ok(Batch {
            id: row.try_get("id")?,
            owner: row.try_get("owner")?,
            route: row.try_get("route")?,
            input_file: row.try_get("input_file")?,
            completion_window: row.try_get("completion_window")?,
            metadata: json(row.try_get("metadata")?),
            state: BatchState::numbered(row.try_get("state")?),
            errors: errors.and_then(|errors| errors.as_array().cloned()).unwrap_or_default(),
            requests: row.try_get("requests")?,
            completed: row.try_get::<Option<i64>, _>("completed")?.unwrap_or(0),
            failed: row.try_get::<Option<i64>, _>("failed")?.unwrap_or(0),
            output_file: row.try_get("output_file")?,
            error_file: row.try_get("error_file")?,
            created_us: row.try_get("created_us")?,
            expires_us: row.try_get("expires_us")?,
            cancelling_us: row.try_get("cancelling_us")?,
            ended_us: row.try_get("ended_us")?,
        })
    }
}

/// What became of a line.
#[derive(Clone, Debug)]
pub struct BatchAnswer {
    /// Its job's.
    pub id: String,
    /// What its owner calls it.
    pub custom_id: String,
    /// How it ended.
    pub state: State,
    /// The envelope of its result or failure.
    pub output: Value,
}

impl Store {
    /// Begins a batch. When this returns, it and all its requests are on disk.
    pub async fn begin_batch(&self, batch: NewBatch) -> Result<Batch, Error> {
        let fingerprint = batch.fingerprint();
        if batch.shares {
            let bytes = batch.requests.iter().map(|request| request.body.len() as u64).sum();
            self.hold(&batch.owner, bytes).await?;
        }
        let mut change = self.inner.writer.begin().await?;
        let statement = "SELECT COUNT(*) AS count FROM batches WHERE owner = $1";
        let row = sqlx::query(statement).bind(&batch.owner).fetch_one(&mut *change).await?;
        if u64::try_from(row.try_get::<i64, _>("count")?).unwrap_or(0) >= BATCHES_MAX {
            return Err(Error::BatchesFull { max: BATCHES_MAX });
        }
        let (id, now) = (self.word("batch_"), self.inner.clock.now_us());
        let expires_us = now.saturating_add(batch.window_us);
        let errors = (!batch.errors.is_empty()).then(|| Value::from(batch.errors.clone()).to_string());
        let state = if errors.is_some() { BatchState::Failed } else { BatchState::InProgress };
        let statement = "INSERT INTO batches (id, owner, idempotency_key, fingerprint, route, input_file, \
             completion_window, metadata, state, errors, requests, created_us, expires_us, ended_us) \
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14) ON CONFLICT DO NOTHING";
        let insert = sqlx::query(statement)
            .bind(&id)
            .bind(&batch.owner)
            .bind(&batch.idempotency_key)
            .bind(&fingerprint)
            .bind(&batch.route)
            .bind(&batch.input_file)
            .bind(&batch.completion_window)
            .bind(batch.metadata.to_string())
            .bind(state.number())
            .bind(&errors)
            .bind(i64::try_from(batch.requests.len()).unwrap_or(i64::MAX))
            .bind(now)
            .bind(expires_us)
            .bind(errors.is_some().then_some(now));
        if insert.execute(&mut *change).await?.rows_affected() == 0 {
            let statement = "SELECT id, fingerprint FROM batches WHERE owner = $1 AND idempotency_key = $2";
            let known = sqlx::query(statement).bind(&batch.owner).bind(&batch.idempotency_key);
            let known = known.fetch_one(&mut *change).await?;
            let (id, other): (String, String) = (known.try_get("id")?, known.try_get("fingerprint")?);
            drop(change);
            if other != fingerprint {
                return Err(Error::KeyReused);
            }
            return self.batch(&batch.owner, &id).await?.ok_or(Error::NotFound);
        }
        if errors.is_none() {
            self.room_for(&batch, &mut change).await?;
            for (line, request) in batch.requests.iter().enumerate() {
                self.queue_line(&batch, request, (&id, line, expires_us), &mut change).await?;
            }
        }
        change.commit().await?;
        self.wake();
        self.batch(&batch.owner, &id).await?.ok_or(Error::NotFound)
    }

    /// Refuses where more would wait for a model than may.
    async fn room_for(
        &self,
        batch: &NewBatch,
        change: &mut sqlx::Transaction<'_, sqlx::Any>,
    ) -> Result<(), Error> {
        let mut models: Vec<&str> = batch.requests.iter().map(|request| request.model.as_str()).collect();
        models.sort_unstable();
        for same in models.chunk_by(|a, b| a == b) {
            let statement = "SELECT COUNT(*) AS count FROM jobs WHERE model = $1 AND state = 0";
            let row = sqlx::query(statement).bind(same[0]).fetch_one(&mut **change).await?;
            let waiting = u64::try_from(row.try_get::<i64, _>("count")?).unwrap_or(0);
            let max = self.queue_max();
            let (more, free) = (same.len() as u64, max.saturating_sub(waiting));
            if more > free {
                return Err(Error::QueueFull { waiting, max });
            }
            if batch.shares {
                // As for single jobs: whoever has some waiting gets more as long as that is no more than what is free.
                let statement =
                    "SELECT COUNT(*) AS count FROM jobs WHERE model = $1 AND state = 0 AND owner = $2";
                let row = sqlx::query(statement).bind(same[0]).bind(&batch.owner);
                let own = row.fetch_one(&mut **change).await?.try_get::<i64, _>("count")?;
                let own = u64::try_from(own).unwrap_or(0);
                if own > 0 && own.saturating_add(more) > free {
                    return Err(Error::ShareFull { waiting: own });
                }
            }
        }
        Ok(())
    }

    /// Writes a line's job. It goes behind all that somebody waits for, and lines go one after the other.
    async fn queue_line(
        &self,
        batch: &NewBatch,
        request: &BatchRequest,
        (id, line, expires_us): (&str, usize, i64),
        change: &mut sqlx::Transaction<'_, sqlx::Any>,
    ) -> Result<(), Error> {
        let statement = "INSERT INTO jobs (id, model, owner, fingerprint, state, priority, input, created_us, \
             not_before_us, expires_us, execution_us, attempts, retries, beat, streamed, route, batch, line, custom_id, bytes) \
             VALUES ($1, $2, $3, '', 0, 1, $4, $5, $5, $6, 0, 0, 0, 0, 0, $7, $8, $9, $10, $11)";
        let insert = sqlx::query(statement)
            .bind(self.word(""))
            .bind(&request.model)
            .bind(&batch.owner)
            .bind(&request.body)
            .bind(self.inner.clock.now_us())
            .bind(expires_us)
            .bind(&batch.route)
            .bind(id)
            .bind(i64::try_from(line).unwrap_or(i64::MAX))
            .bind(&request.custom_id)
            .bind(i64::try_from(request.body.len()).unwrap_or(i64::MAX));
        insert.execute(&mut **change).await?;
        Ok(())
    }

    /// An owner's batch, with how far it is.
    pub async fn batch(&self, owner: &str, id: &str) -> Result<Option<Batch>, Error> {
        let statement = format!("SELECT {BATCH} FROM batches WHERE owner = $1 AND id = $2");
        let row = sqlx::query(sqlx::AssertSqlSafe(statement)).bind(owner).bind(id);
        let Some(row) = row.fetch_optional(&self.inner.reader).await? else { return Ok(None) };
        self.counted(Batch::read(&row)?).await.map(Some)
    }

    /// An owner's batches.
    pub async fn batches(&self, owner: &str, page: Page<'_>) -> Result<Vec<Batch>, Error> {
        let (beyond, order) = page.sql();
        let statement = format!(
            "SELECT {BATCH} FROM batches WHERE owner = $1 AND ($2 = '' OR id {beyond} $2) ORDER BY id {order} LIMIT $3"
        );
        let rows =
            sqlx::query(sqlx::AssertSqlSafe(statement)).bind(owner).bind(page.after.unwrap_or_default());
        let mut batches = Vec::new();
        for row in rows.bind(page.most).fetch_all(&self.inner.reader).await? {
            batches.push(self.counted(Batch::read(&row)?).await?);
        }
        Ok(batches)
    }

    /// Counts what has ended of a batch that has not.
    async fn counted(&self, mut batch: Batch) -> Result<Batch, Error> {
        if batch.ended_us.is_some() {
            return Ok(batch);
        }
        let statement = "SELECT state, COUNT(*) AS count FROM jobs WHERE batch = $1 GROUP BY state";
        for row in sqlx::query(statement).bind(&batch.id).fetch_all(&self.inner.reader).await? {
            let count: i64 = row.try_get("count")?;
            match State::numbered(row.try_get("state")?) {
                State::Completed => batch.completed += count,
                State::Failed | State::TimedOut => batch.failed += count,
                State::Queued | State::Running | State::Cancelled => {}
            }
        }
        Ok(batch)
    }

    /// Cancels a batch that has not ended: what waits or is being answered is not wanted any more. Returns how it
    /// stands then; one that has ended stays as it is.
    pub async fn cancel_batch(&self, owner: &str, id: &str) -> Result<Batch, Error> {
        let now = self.inner.clock.now_us();
        let mut change = self.inner.writer.begin().await?;
        let statement =
            "UPDATE batches SET state = 1, cancelling_us = $3 WHERE owner = $1 AND id = $2 AND state = 0";
        let update = sqlx::query(statement).bind(owner).bind(id).bind(now);
        if update.execute(&mut *change).await?.rows_affected() > 0 {
            let statement = "UPDATE jobs SET state = 4, finished_us = $2, lease = NULL, worker = NULL \
                 WHERE batch = $1 AND state IN (0, 1)";
            sqlx::query(statement).bind(id).bind(now).execute(&mut *change).await?;
        }
        change.commit().await?;
        self.inner.released.notify_one();
        self.batch(owner, id).await?.ok_or(Error::NotFound)
    }

    /// Ends every batch whose last request has ended: its answers are written to files, in the order of its lines, each
    /// as the text that `write` makes of it. Returns how many ended.
    pub async fn settle_batches(&self, write: impl Fn(&BatchAnswer) -> String) -> Result<usize, Error> {
        let statement = "SELECT id FROM batches WHERE state < 2 AND NOT EXISTS \
             (SELECT 1 FROM jobs WHERE batch = batches.id AND state IN (0, 1)) LIMIT $1";
        let rows = sqlx::query(statement).bind(SETTLE_MAX).fetch_all(&self.inner.reader).await?;
        let mut settled = 0;
        for row in rows {
            settled += usize::from(self.settle(&row.try_get::<String, _>("id")?, &write).await?);
        }
        Ok(settled)
    }

    /// One transaction: a worker that dies in it leaves everything as it was.
    async fn settle(&self, id: &str, write: &impl Fn(&BatchAnswer) -> String) -> Result<bool, Error> {
        let now = self.inner.clock.now_us();
        let mut change = self.inner.writer.begin().await?;
        // Touching the row first lets two workers follow each other; the second finds the batch ended.
        let statement = format!(
            "UPDATE batches SET ended_us = $2 WHERE id = $1 AND state < 2 AND NOT EXISTS \
             (SELECT 1 FROM jobs WHERE batch = batches.id AND state IN (0, 1)) RETURNING {BATCH}"
        );
        let row = sqlx::query(sqlx::AssertSqlSafe(statement)).bind(id).bind(now);
        let Some(row) = row.fetch_optional(&mut *change).await? else { return Ok(false) };
        let batch = Batch::read(&row)?;
        let (mut answers, mut errors) =
            (FileWriter::new(self.word("file-")), FileWriter::new(self.word("file-")));
        let (mut completed, mut failed, mut expired, mut next) = (0, 0, 0, 0);
        loop {
            let statement = "SELECT id, line, custom_id, state, output FROM jobs WHERE batch = $1 AND line >= $2 \
                 ORDER BY line LIMIT $3";
            let rows = sqlx::query(statement).bind(id).bind(next).bind(READ_TOGETHER);
            let rows = rows.fetch_all(&mut *change).await?;
            for row in &rows {
                next = row.try_get::<i64, _>("line")? + 1;
                let answer = BatchAnswer::read(row)?;
                let file = match answer.state {
                    State::Completed => {
                        completed += 1;
                        &mut answers
                    }
                    // Nobody wants to hear of what was cancelled with its batch.
                    State::Cancelled if batch.state == BatchState::Cancelling => continue,
                    _ => {
                        failed += 1;
                        expired += i64::from(answer.output["code"] == "TTL_EXPIRED");
                        &mut errors
                    }
                };
                file.write(&mut change, &(write(&answer) + "\n")).await?;
            }
            if rows.is_empty() {
                break;
            }
        }
        let mut files = [None, None];
        for ((writer, what), file) in [(answers, "output"), (errors, "error")].into_iter().zip(&mut files) {
            if !writer.is_empty() {
                let (name, purpose) = (format!("{id}_{what}.jsonl"), "batch_output".to_owned());
                *file = Some(writer.close(self, &mut change, &batch.owner, name, purpose).await?.id);
            }
        }
        let state = match batch.state {
            BatchState::Cancelling => BatchState::Cancelled,
            _ if expired > 0 => BatchState::Expired,
            _ => BatchState::Completed,
        };
        let [output, error] = files;
        let statement = "UPDATE batches SET state = $2, completed = $3, failed = $4, output_file = $5, error_file = $6 \
             WHERE id = $1";
        let update = sqlx::query(statement).bind(id).bind(state.number()).bind(completed).bind(failed);
        update.bind(output).bind(error).execute(&mut *change).await?;
        for statement in [
            "DELETE FROM events WHERE job_id IN (SELECT id FROM jobs WHERE batch = $1)",
            "DELETE FROM jobs WHERE batch = $1",
        ] {
            sqlx::query(statement).bind(id).execute(&mut *change).await?;
        }
        change.commit().await?;
        Ok(true)
    }

    /// Forgets batches that ended long ago.
    pub(crate) async fn sweep_batches(&self) -> Result<(), Error> {
        let before = self.inner.clock.now_us().saturating_sub(self.retention_us());
        let delete = sqlx::query("DELETE FROM batches WHERE ended_us < $1").bind(before);
        delete.execute(&self.inner.writer).await?;
        Ok(())
    }
}

impl NewBatch {
    /// Two batches under one key must ask for the same.
    fn fingerprint(&self) -> String {
        let said = serde_json::json!([self.route, self.input_file, self.completion_window, self.metadata]);
        Sha256::digest(said.to_string()).iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl BatchAnswer {
    fn read(row: &AnyRow) -> Result<BatchAnswer, sqlx::Error> {
        let output: Option<String> = row.try_get("output")?;
        Ok(BatchAnswer {
            id: row.try_get("id")?,
            custom_id: row.try_get("custom_id")?,
            state: State::numbered(row.try_get("state")?),
            output: output.and_then(|text| serde_json::from_str(&text).ok()).unwrap_or(Value::Null),
        })
    }
}
