//! Answers that are kept, so that a conversation goes on from them without being sent again; and those that are made
//! while nobody waits, each by a job of the same id.
//!
//! A response has the items that it was asked with and those that it answered, and names the one before it: together
//! they are the conversation. Whoever goes on from a response keeps all of its conversation for longer.

use serde_json::Value;
use sqlx::{Any, Row, Transaction, any::AnyRow};

use crate::{Error, NewJob, Page, State, Store};

/// Responses that one sweep forgets, and that are looked at together to make room.
const SWEEP_MAX: i64 = 100;

/// Responses that are ended by one call.
const SETTLE_MAX: i64 = 16;

/// A part of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResponseItem {
    /// What it can be referred to by.
    pub id: String,
    /// Whether it was answered, not asked.
    pub said: bool,
    /// The JSON text of it.
    pub body: String,
}

/// A response to be kept.
#[derive(Clone, Debug)]
pub struct NewResponse {
    /// Unguessable.
    pub id: String,
    /// Whose it is; nobody else sees it.
    pub owner: String,
    /// The response that it goes on from.
    pub previous: Option<String>,
    /// The conversation of an id of its own that its items are added to, once it is answered.
    pub conversation: Option<String>,
    /// The JSON text of all that is told of it.
    pub body: String,
    /// What was asked, and what was answered so far.
    pub items: Vec<ResponseItem>,
}

/// A response as it is kept.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredResponse {
    /// What is told of it.
    pub body: Value,
    /// Where the job is that answers it; `None` once it is answered.
    pub state: Option<State>,
}

/// A response whose job has ended.
#[derive(Clone, Debug)]
pub struct EndedResponse {
    /// What was told of it when it was begun.
    pub body: Value,
    /// How its job ended.
    pub state: State,
    /// The envelope of the job's result or failure.
    pub output: Value,
}

/// What went before a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conversation {
    /// The oldest first.
    ids: Vec<String>,
    /// Bytes of all items.
    pub bytes: u64,
    /// Whether the newest response is still being answered.
    pub is_open: bool,
    /// Whether the oldest is where it began: others were not forgotten.
    pub is_whole: bool,
}

impl Store {
    /// Keeps a response. When this returns it is on disk. Where its owner has as many as may be kept, those that were
    /// not used for the longest make room.
    pub async fn keep_response(&self, response: &NewResponse) -> Result<(), Error> {
        let mut change = self.inner.writer.begin().await?;
        self.write_response(&mut change, response, false).await?;
        if let Some(conversation) = &response.conversation {
            self.add_response(&mut change, &response.owner, conversation, &response.id).await?;
        }
        change.commit().await?;
        Ok(())
    }

    /// Begins a response that a job answers while nobody waits. When this returns both are on disk. The job asks
    /// `route`.
    pub async fn begin_response(
        &self,
        response: &NewResponse,
        job: &NewJob,
        route: &str,
    ) -> Result<(), Error> {
        let input = job.input.to_string();
        self.make_room(job, input.len() as u64).await?;
        let now = self.inner.clock.now_us();
        let mut change = self.inner.writer.begin().await?;
        self.write_response(&mut change, response, true).await?;
        let statement = "INSERT INTO jobs (id, model, owner, fingerprint, state, priority, input, created_us, \
             not_before_us, expires_us, execution_us, attempts, retries, beat, streamed, route, bytes) \
             VALUES ($1, $2, $3, '', 0, 0, $4, $5, $5, $6, 0, 0, 0, 0, 0, $7, $8)";
        let insert = sqlx::query(statement).bind(&response.id).bind(&job.model).bind(&job.owner).bind(&input);
        let insert =
            insert.bind(now).bind(i64::MAX).bind(route).bind(i64::try_from(input.len()).unwrap_or(i64::MAX));
        insert.execute(&mut *change).await?;
        self.note(&mut change, &response.id, "submitted", 0, None).await?;
        change.commit().await?;
        self.wake();
        Ok(())
    }

    async fn write_response(
        &self,
        change: &mut Transaction<'_, Any>,
        response: &NewResponse,
        open: bool,
    ) -> Result<(), Error> {
        let now = self.inner.clock.now_us();
        let expires = now.saturating_add(self.retention_us());
        if let Some(previous) = &response.previous {
            let statement = "WITH RECURSIVE chain (id, previous) AS (\
                 SELECT id, previous FROM responses WHERE owner = $1 AND id = $2 UNION ALL \
                 SELECT responses.id, responses.previous FROM responses JOIN chain ON responses.id = chain.previous \
                 WHERE responses.owner = $1) UPDATE responses SET expires_us = $3 WHERE id IN (SELECT id FROM chain)";
            let update = sqlx::query(statement).bind(&response.owner).bind(previous).bind(expires);
            update.execute(&mut **change).await?;
        }
        let items_bytes = response.items.iter().map(ResponseItem::bytes).sum::<i64>();
        let bytes = items_bytes.saturating_add(length(&response.body));
        self.forget_unused(change, &response.owner, bytes).await?;
        let statement = "INSERT INTO responses (id, owner, previous, body, open, items_bytes, bytes, created_us, expires_us) \
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)";
        let insert = sqlx::query(statement).bind(&response.id).bind(&response.owner).bind(&response.previous);
        let insert = insert.bind(&response.body).bind(i64::from(open)).bind(items_bytes).bind(bytes);
        insert.bind(now).bind(expires).execute(&mut **change).await?;
        write_items(change, &response.id, &response.items, 0).await
    }

    /// Makes room for this many bytes of an owner's.
    pub(crate) async fn forget_unused(
        &self,
        change: &mut Transaction<'_, Any>,
        owner: &str,
        bytes: i64,
    ) -> Result<(), Error> {
        let (most, bytes_max) = self.response_bounds();
        let statement = "SELECT COUNT(*) AS count, CAST(COALESCE(SUM(bytes), 0) AS BIGINT) AS bytes FROM responses \
             WHERE owner = $1";
        let row = sqlx::query(statement).bind(owner).fetch_one(&mut **change).await?;
        let (mut count, mut held) = (row.try_get::<i64, _>("count")?, row.try_get::<i64, _>("bytes")?);
        let is_full = |count: i64, held: i64| {
            let fits = |value: i64, max: u64| u64::try_from(value).is_ok_and(|value| value <= max);
            !fits(count.saturating_add(1), most) || !fits(held.saturating_add(bytes), bytes_max)
        };
        while is_full(count, held) {
            let statement = "SELECT id, bytes FROM responses WHERE owner = $1 AND open = 0 \
                 ORDER BY expires_us, created_us LIMIT $2";
            let rows = sqlx::query(statement).bind(owner).bind(SWEEP_MAX).fetch_all(&mut **change).await?;
            if rows.is_empty() {
                break;
            }
            for row in rows {
                if !is_full(count, held) {
                    break;
                }
                forget(change, &row.try_get::<String, _>("id")?).await?;
                count -= 1;
                held -= row.try_get::<i64, _>("bytes")?;
            }
        }
        Ok(())
    }

    /// An owner's response.
    pub async fn response(&self, owner: &str, id: &str) -> Result<Option<StoredResponse>, Error> {
        let statement = "SELECT responses.body, CASE WHEN responses.open = 1 THEN jobs.state END AS state FROM responses \
             LEFT JOIN jobs ON jobs.id = responses.id WHERE responses.owner = $1 AND responses.id = $2";
        let row = sqlx::query(statement).bind(owner).bind(id).fetch_optional(&self.inner.reader).await?;
        let Some(row) = row else { return Ok(None) };
        let state = row.try_get::<Option<i64>, _>("state")?.map(State::numbered);
        Ok(Some(StoredResponse { body: json_of(&row)?, state }))
    }

    /// Bytes of an owner's response and of all its items; nothing if there is no such response.
    pub async fn response_bytes(&self, owner: &str, id: &str) -> Result<Option<usize>, Error> {
        let statement = "SELECT bytes FROM responses WHERE owner = $1 AND id = $2";
        let row = sqlx::query(statement).bind(owner).bind(id).fetch_optional(&self.inner.reader).await?;
        let bytes = row.map(|row| row.try_get::<i64, _>("bytes")).transpose()?;
        Ok(bytes.map(|bytes| usize::try_from(bytes).unwrap_or(0)))
    }

    /// What an owner's response was asked with; nothing if there is no such response.
    pub async fn response_input(
        &self,
        owner: &str,
        id: &str,
        page: Page<'_>,
    ) -> Result<Option<Vec<Value>>, Error> {
        self.page_of_items(owner, id, page, "AND said = 0").await
    }

    /// Those items of an owner's response or conversation for which a condition holds; nothing if there is none.
    pub(crate) async fn page_of_items(
        &self,
        owner: &str,
        id: &str,
        page: Page<'_>,
        condition: &'static str,
    ) -> Result<Option<Vec<Value>>, Error> {
        let statement = "SELECT id FROM responses WHERE owner = $1 AND id = $2";
        let known = sqlx::query(statement).bind(owner).bind(id).fetch_optional(&self.inner.reader).await?;
        if known.is_none() {
            return Ok(None);
        }
        let (beyond, order) = page.sql();
        let statement = format!(
            "SELECT body FROM response_items WHERE response_id = $1 {condition} AND ($2 = '' OR n {beyond} \
             (SELECT MIN(n) FROM response_items WHERE response_id = $1 AND id = $2)) ORDER BY n {order} LIMIT $3"
        );
        let rows = sqlx::query(sqlx::AssertSqlSafe(statement)).bind(id).bind(page.after.unwrap_or_default());
        let rows = rows.bind(page.most).fetch_all(&self.inner.reader).await?;
        rows.iter().map(json_of).collect::<Result<_, _>>().map(Some)
    }

    /// An item of an owner's responses, as JSON text; of several that are called alike, one that was answered.
    pub async fn response_item(&self, owner: &str, id: &str) -> Result<Option<String>, Error> {
        let statement = "SELECT response_items.body FROM response_items JOIN responses ON responses.id = response_id \
             WHERE response_items.id = $2 AND responses.owner = $1 ORDER BY said DESC, responses.created_us DESC LIMIT 1";
        let row = sqlx::query(statement).bind(owner).bind(id).fetch_optional(&self.inner.reader).await?;
        Ok(row.map(|row| row.try_get("body")).transpose()?)
    }

    /// The conversation that an owner's response ends; nothing if there is no such response.
    pub async fn conversation(&self, owner: &str, id: &str) -> Result<Option<Conversation>, Error> {
        let statement = "WITH RECURSIVE chain (id, previous, open, items_bytes, place) AS (\
             SELECT id, previous, open, items_bytes, CAST(0 AS BIGINT) FROM responses WHERE owner = $1 AND id = $2 \
             UNION ALL SELECT responses.id, responses.previous, responses.open, responses.items_bytes, place + 1 \
             FROM responses JOIN chain ON responses.id = chain.previous WHERE responses.owner = $1) \
             SELECT id, previous, open, items_bytes FROM chain ORDER BY place DESC";
        let rows = sqlx::query(statement).bind(owner).bind(id).fetch_all(&self.inner.reader).await?;
        let (Some(oldest), Some(newest)) = (rows.first(), rows.last()) else { return Ok(None) };
        let mut bytes = 0u64;
        for row in &rows {
            bytes = bytes.saturating_add(u64::try_from(row.try_get::<i64, _>("items_bytes")?).unwrap_or(0));
        }
        Ok(Some(Conversation {
            bytes,
            is_open: newest.try_get::<i64, _>("open")? == 1,
            is_whole: oldest.try_get::<Option<String>, _>("previous")?.is_none(),
            ids: rows.iter().map(|row| row.try_get("id")).collect::<Result<_, _>>()?,
        }))
    }

    /// All that was asked and answered in a conversation, each item as JSON text.
    pub async fn conversation_items(&self, conversation: &Conversation) -> Result<Vec<String>, Error> {
        let mut items = Vec::new();
        for id in &conversation.ids {
            let statement = "SELECT body FROM response_items WHERE response_id = $1 ORDER BY n";
            for row in sqlx::query(statement).bind(id).fetch_all(&self.inner.reader).await? {
                items.push(row.try_get("body")?);
            }
        }
        Ok(items)
    }

    /// Forgets an owner's response, and stops the job that answers it; whether it was there.
    pub async fn delete_response(&self, owner: &str, id: &str) -> Result<bool, Error> {
        let mut change = self.inner.writer.begin().await?;
        let statement = "SELECT open FROM responses WHERE owner = $1 AND id = $2";
        let row = sqlx::query(statement).bind(owner).bind(id).fetch_optional(&mut *change).await?;
        let Some(row) = row else { return Ok(false) };
        let is_open = row.try_get::<i64, _>("open")? == 1;
        forget(&mut change, id).await?;
        if is_open {
            forget_job(&mut change, id).await?;
        }
        change.commit().await?;
        if is_open {
            self.inner.released.notify_one();
        }
        Ok(true)
    }

    /// Ends every response whose job has ended: it is told and has answered what `write` makes of it. Returns how many
    /// ended.
    pub async fn settle_responses(
        &self,
        write: impl Fn(EndedResponse) -> (String, Vec<ResponseItem>),
    ) -> Result<usize, Error> {
        let statement = "SELECT responses.id FROM responses JOIN jobs ON jobs.id = responses.id \
             WHERE responses.open = 1 AND jobs.state > 1 LIMIT $1";
        let rows = sqlx::query(statement).bind(SETTLE_MAX).fetch_all(&self.inner.reader).await?;
        let mut settled = 0;
        for row in rows {
            let id: String = row.try_get("id")?;
            settled += usize::from(self.settle_response(&id, &write).await?);
        }
        Ok(settled)
    }

    /// Ends one whose job has ended, in one transaction: the job, which nobody needs any more, is forgotten.
    pub async fn settle_response(
        &self,
        id: &str,
        write: impl Fn(EndedResponse) -> (String, Vec<ResponseItem>),
    ) -> Result<bool, Error> {
        let expires = self.inner.clock.now_us().saturating_add(self.retention_us());
        let mut change = self.inner.writer.begin().await?;
        // Touching the row first lets two workers follow each other; the second finds the response ended.
        let statement = "UPDATE responses SET open = 0, expires_us = $2 WHERE id = $1 AND open = 1 AND EXISTS \
             (SELECT 1 FROM jobs WHERE jobs.id = responses.id AND jobs.state > 1) RETURNING body, owner";
        let row = sqlx::query(statement).bind(id).bind(expires).fetch_optional(&mut *change).await?;
        let Some(row) = row else { return Ok(false) };
        let (body, owner) = (json_of(&row)?, row.try_get::<String, _>("owner")?);
        // It is told of the response, so there is no second place that keeps it.
        let conversation = body["conversation"]["id"].as_str().map(str::to_owned);
        let job = sqlx::query("SELECT state, output FROM jobs WHERE id = $1").bind(id);
        let job = job.fetch_one(&mut *change).await?;
        let output: Option<String> = job.try_get("output")?;
        let output = output.and_then(|text| serde_json::from_str(&text).ok()).unwrap_or(Value::Null);
        let state = State::numbered(job.try_get("state")?);
        let (body, items) = write(EndedResponse { body, state, output });
        let statement = "SELECT COUNT(*) AS count FROM response_items WHERE response_id = $1";
        let row = sqlx::query(statement).bind(id).fetch_one(&mut *change).await?;
        write_items(&mut change, id, &items, row.try_get("count")?).await?;
        let items_bytes = items.iter().map(ResponseItem::bytes).sum::<i64>();
        let statement = "UPDATE responses SET body = $2, items_bytes = items_bytes + $3, bytes = items_bytes + $3 + $4 \
             WHERE id = $1";
        let update = sqlx::query(statement).bind(id).bind(&body).bind(items_bytes).bind(length(&body));
        update.execute(&mut *change).await?;
        if let Some(conversation) = conversation.filter(|_| state == State::Completed) {
            self.add_response(&mut change, &owner, &conversation, id).await?;
        }
        forget_job(&mut change, id).await?;
        change.commit().await?;
        Ok(true)
    }

    /// Forgets responses that were not used for long.
    pub(crate) async fn sweep_responses(&self) -> Result<(), Error> {
        let statement = "SELECT id FROM responses WHERE expires_us < $1 AND open = 0 LIMIT $2";
        let old = sqlx::query(statement).bind(self.inner.clock.now_us()).bind(SWEEP_MAX);
        let old = old.fetch_all(&self.inner.reader).await?;
        if old.is_empty() {
            return Ok(());
        }
        let mut change = self.inner.writer.begin().await?;
        for row in old {
            forget(&mut change, &row.try_get::<String, _>("id")?).await?;
        }
        change.commit().await?;
        Ok(())
    }
}

impl ResponseItem {
    pub(crate) fn bytes(&self) -> i64 {
        length(&self.body)
    }
}

pub(crate) fn length(text: &str) -> i64 {
    i64::try_from(text.len()).unwrap_or(i64::MAX)
}

pub(crate) fn json_of(row: &AnyRow) -> Result<Value, Error> {
    let body: String = row.try_get("body")?;
    serde_json::from_str(&body).map_err(|error| Error::Database(error.to_string()))
}

pub(crate) async fn write_items(
    change: &mut Transaction<'_, Any>,
    id: &str,
    items: &[ResponseItem],
    from: i64,
) -> Result<(), Error> {
    for (n, item) in (from..).zip(items) {
        let statement =
            "INSERT INTO response_items (response_id, n, id, said, body) VALUES ($1, $2, $3, $4, $5)";
        let insert = sqlx::query(statement).bind(id).bind(n).bind(&item.id).bind(i64::from(item.said));
        insert.bind(&item.body).execute(&mut **change).await?;
    }
    Ok(())
}

async fn forget(change: &mut Transaction<'_, Any>, id: &str) -> Result<(), Error> {
    for statement in
        ["DELETE FROM response_items WHERE response_id = $1", "DELETE FROM responses WHERE id = $1"]
    {
        sqlx::query(statement).bind(id).execute(&mut **change).await?;
    }
    Ok(())
}

async fn forget_job(change: &mut Transaction<'_, Any>, id: &str) -> Result<(), Error> {
    for statement in ["DELETE FROM events WHERE job_id = $1", "DELETE FROM jobs WHERE id = $1"] {
        sqlx::query(statement).bind(id).execute(&mut **change).await?;
    }
    Ok(())
}
