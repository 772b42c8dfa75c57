//! Models that clients made of others, kept by their names. What a model is made of is the server's affair.

use serde_json::Value;
use sqlx::Row;

use crate::{Error, Store, response::json_of};

impl Store {
    /// Keeps a model; a later one of that name takes its place. When this returns it is on disk.
    pub async fn keep_made(&self, name: &str, body: &Value) -> Result<(), Error> {
        let statement = "INSERT INTO made_models (name, body) VALUES ($1, $2) \
             ON CONFLICT (name) DO UPDATE SET body = excluded.body";
        let insert = sqlx::query(statement).bind(name).bind(body.to_string());
        insert.execute(&self.inner.writer).await?;
        Ok(())
    }

    /// Forgets a model; whether it was there.
    pub async fn forget_made(&self, name: &str) -> Result<bool, Error> {
        let delete = sqlx::query("DELETE FROM made_models WHERE name = $1").bind(name);
        Ok(delete.execute(&self.inner.writer).await?.rows_affected() > 0)
    }

    /// All of them, by name.
    pub async fn made(&self) -> Result<Vec<(String, Value)>, Error> {
        let rows = sqlx::query("SELECT name, body FROM made_models ORDER BY name");
        let rows = rows.fetch_all(&self.inner.reader).await?;
        rows.iter().map(|row| Ok((row.try_get("name")?, json_of(row)?))).collect()
    }
}
