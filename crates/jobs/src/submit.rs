//! Accepting jobs: those that come together are written together, so that the disk is waited for once.

use std::sync::Weak;

use sha2::{Digest, Sha256};
use sqlx::Row;
use tokio::sync::{mpsc, oneshot};

use crate::{
    Error,
    job::{NewJob, State},
    store::Inner,
};

/// An accepted job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Submitted {
    /// Its id.
    pub id: String,
    /// Where it is: in the queue, unless its key was known.
    pub state: State,
    /// Whether it was not there before.
    pub is_new: bool,
}

/// A job on its way to the disk.
pub(crate) struct Submission {
    pub(crate) id: String,
    pub(crate) fingerprint: String,
    /// The job's input as it is stored.
    pub(crate) input: String,
    pub(crate) job: NewJob,
    pub(crate) reply: oneshot::Sender<Result<Submitted, Error>>,
}

/// Two submissions under one key must ask for the same.
pub(crate) fn fingerprint(job: &NewJob) -> String {
    let policy = job.policy;
    let said = serde_json::json!([
        job.input,
        job.webhook,
        policy.execution_timeout_ms,
        policy.ttl_ms,
        policy.low_priority
    ]);
    Sha256::digest(said.to_string()).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Writes submissions until the store is gone. Whatever has arrived while the disk was busy is the next transaction.
pub(crate) async fn write_together(
    inner: Weak<Inner>,
    mut arrived: mpsc::Receiver<Submission>,
    together_max: usize,
) {
    let mut batch = Vec::new();
    while arrived.recv_many(&mut batch, together_max).await > 0 {
        let Some(inner) = inner.upgrade() else { return };
        match write(&inner, &batch).await {
            Ok(written) => {
                for (submission, submitted) in batch.drain(..).zip(written) {
                    // A client that is gone has its job all the same.
                    drop(submission.reply.send(submitted));
                }
            }
            Err(error) => {
                let full = matches!(error, Error::DiskFull);
                let message = error.to_string();
                for submission in batch.drain(..) {
                    let error = if full { Error::DiskFull } else { Error::Database(message.clone()) };
                    drop(submission.reply.send(Err(error)));
                }
            }
        }
    }
}

/// One transaction: all are on disk when it returns, or none is.
async fn write(inner: &Inner, batch: &[Submission]) -> Result<Vec<Result<Submitted, Error>>, Error> {
    let mut change = inner.writer.begin().await?;
    let mut written = Vec::with_capacity(batch.len());
    for Submission { id, fingerprint, input, job, .. } in batch {
        let now = inner.clock.now_us();
        let expires = job.policy.ttl_ms.map_or(i64::MAX, |ttl| now.saturating_add(ttl.saturating_mul(1000)));
        let statement = "INSERT INTO jobs (id, model, owner, idempotency_key, fingerprint, state, priority, input, \
             webhook, ttl_ms, execution_timeout_ms, created_us, not_before_us, expires_us, execution_us, attempts, \
             retries, beat, streamed, items, bytes) \
             VALUES ($1, $2, $3, $4, $5, 0, $6, $7, $8, $9, $10, $11, $11, $12, 0, 0, 0, 0, 0, $13, $14) \
             ON CONFLICT DO NOTHING";
        let insert = sqlx::query(statement)
            .bind(id)
            .bind(&job.model)
            .bind(&job.owner)
            .bind(&job.idempotency_key)
            .bind(fingerprint)
            .bind(i64::from(job.policy.low_priority))
            .bind(input)
            .bind(&job.webhook)
            .bind(job.policy.ttl_ms)
            .bind(job.policy.execution_timeout_ms)
            .bind(now)
            .bind(expires)
            .bind(job.input["items"].as_array().and_then(|items| i64::try_from(items.len()).ok()))
            .bind(i64::try_from(input.len()).unwrap_or(i64::MAX));
        if insert.execute(&mut *change).await?.rows_affected() > 0 {
            let statement =
                "INSERT INTO events (job_id, at_us, event, attempt) VALUES ($1, $2, 'submitted', 0)";
            sqlx::query(statement).bind(id).bind(now).execute(&mut *change).await?;
            written.push(Ok(Submitted { id: id.clone(), state: State::Queued, is_new: true }));
            continue;
        }
        let statement = "SELECT id, state, fingerprint FROM jobs WHERE model = $1 AND owner = $2 \
             AND idempotency_key = $3";
        let known = sqlx::query(statement).bind(&job.model).bind(&job.owner).bind(&job.idempotency_key);
        let known = known.fetch_one(&mut *change).await?;
        written.push(match known.try_get::<String, _>("fingerprint")? == *fingerprint {
            true => Ok(Submitted {
                id: known.try_get("id")?,
                state: State::numbered(known.try_get("state")?),
                is_new: false,
            }),
            false => Err(Error::KeyReused),
        });
    }
    change.commit().await?;
    Ok(written)
}
