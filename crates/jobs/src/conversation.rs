//! Conversations with ids of their own, to which items are added and from which they are taken away. Each is a row
//! among the responses with nothing before it, so it is kept, counted and forgotten as they are; ids tell one from
//! the other.

use serde_json::Value;
use sqlx::{Any, Row, Transaction};

use crate::{
    Error, NewResponse, Page, ResponseItem, Store,
    response::{json_of, length, write_items},
};

impl Store {
    /// Begins a conversation. When this returns it is on disk. Where its owner keeps as much as may be kept, what was
    /// not used for the longest makes room.
    pub async fn begin_conversation(
        &self,
        owner: &str,
        id: &str,
        body: &Value,
        items: Vec<ResponseItem>,
    ) -> Result<(), Error> {
        let (id, owner) = (id.to_owned(), owner.to_owned());
        let row =
            NewResponse { id, owner, previous: None, conversation: None, body: body.to_string(), items };
        self.keep_response(&row).await
    }

    /// Replaces what is told of an owner's conversation; whether it is there.
    pub async fn describe_conversation(&self, owner: &str, id: &str, body: &Value) -> Result<bool, Error> {
        let body = body.to_string();
        let statement = "UPDATE responses SET body = $3, bytes = items_bytes + $4, expires_us = $5 \
             WHERE owner = $1 AND id = $2";
        let update = sqlx::query(statement).bind(owner).bind(id).bind(&body).bind(length(&body));
        let update = update.bind(self.expires_us()).execute(&self.inner.writer).await?;
        Ok(update.rows_affected() > 0)
    }

    /// Adds items at the end of an owner's conversation; whether it is there.
    pub async fn add_items(&self, owner: &str, id: &str, items: &[ResponseItem]) -> Result<bool, Error> {
        let bytes = items.iter().map(ResponseItem::bytes).sum();
        let mut change = self.inner.writer.begin().await?;
        // Used now, it is the last that makes room.
        if self.grow(&mut change, owner, id, 0).await?.is_none() {
            return Ok(false);
        }
        self.forget_unused(&mut change, owner, bytes).await?;
        let Some(from) = self.grow(&mut change, owner, id, bytes).await? else { return Ok(false) };
        write_items(&mut change, id, items, from).await?;
        change.commit().await?;
        Ok(true)
    }

    /// Adds all items of a response to the conversation that it belongs to, if that is still there.
    pub(crate) async fn add_response(
        &self,
        change: &mut Transaction<'_, Any>,
        owner: &str,
        conversation: &str,
        response: &str,
    ) -> Result<(), Error> {
        let bytes = sqlx::query("SELECT items_bytes FROM responses WHERE id = $1").bind(response);
        let bytes = bytes.fetch_one(&mut **change).await?.try_get("items_bytes")?;
        let Some(from) = self.grow(change, owner, conversation, bytes).await? else { return Ok(()) };
        let statement = "INSERT INTO response_items (response_id, n, id, said, body) \
             SELECT $1, n + $2, id, said, body FROM response_items WHERE response_id = $3";
        let insert = sqlx::query(statement).bind(conversation).bind(from).bind(response);
        insert.execute(&mut **change).await?;
        Ok(())
    }

    /// Counts so many more bytes of a conversation, and says which place its next item has; nothing if it is gone.
    /// From here on it is used, and it is this transaction's: two that add to it follow each other.
    async fn grow(
        &self,
        change: &mut Transaction<'_, Any>,
        owner: &str,
        id: &str,
        bytes: i64,
    ) -> Result<Option<i64>, Error> {
        let statement = "UPDATE responses SET items_bytes = items_bytes + $3, bytes = bytes + $3, expires_us = $4 \
             WHERE owner = $1 AND id = $2";
        let update = sqlx::query(statement).bind(owner).bind(id).bind(bytes).bind(self.expires_us());
        if update.execute(&mut **change).await?.rows_affected() == 0 {
            return Ok(None);
        }
        let statement =
            "SELECT CAST(COALESCE(MAX(n), -1) AS BIGINT) AS last FROM response_items WHERE response_id = $1";
        let last: i64 = sqlx::query(statement).bind(id).fetch_one(&mut **change).await?.try_get("last")?;
        Ok(Some(last + 1))
    }

    /// Items of an owner's conversation; nothing if it is not there.
    pub async fn items(&self, owner: &str, id: &str, page: Page<'_>) -> Result<Option<Vec<Value>>, Error> {
        self.page_of_items(owner, id, page, "").await
    }

    /// An item of an owner's conversation.
    pub async fn item(&self, owner: &str, id: &str, item: &str) -> Result<Option<Value>, Error> {
        let statement = "SELECT response_items.body FROM response_items JOIN responses ON responses.id = response_id \
             WHERE responses.owner = $1 AND response_id = $2 AND response_items.id = $3 ORDER BY n LIMIT 1";
        let row = sqlx::query(statement).bind(owner).bind(id).bind(item);
        row.fetch_optional(&self.inner.reader).await?.as_ref().map(json_of).transpose()
    }

    /// Takes an item out of an owner's conversation; whether it was there.
    pub async fn delete_item(&self, owner: &str, id: &str, item: &str) -> Result<bool, Error> {
        let mut change = self.inner.writer.begin().await?;
        // The row first, as whoever adds items does.
        if self.grow(&mut change, owner, id, 0).await?.is_none() {
            return Ok(false);
        }
        let statement = "DELETE FROM response_items WHERE response_id = $1 AND id = $2 RETURNING body";
        let gone = sqlx::query(statement).bind(id).bind(item).fetch_all(&mut *change).await?;
        let mut bytes = 0;
        for row in &gone {
            bytes += length(row.try_get::<&str, _>("body")?);
        }
        self.grow(&mut change, owner, id, -bytes).await?;
        change.commit().await?;
        Ok(!gone.is_empty())
    }

    fn expires_us(&self) -> i64 {
        self.inner.clock.now_us().saturating_add(self.retention_us())
    }
}
