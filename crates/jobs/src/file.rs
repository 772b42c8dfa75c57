//! Files beside the jobs: what clients send to have worked on, and what answers are written to.

use std::mem;

use sqlx::{Any, Row, Transaction, any::AnyRow};

use crate::{Error, Store};

/// Bytes of a part: read and written at once.
const PART_BYTES: usize = 256 << 10;

/// Files that one sweep forgets.
const SWEEP_MAX: i64 = 50;

/// A file to be kept.
#[derive(Clone, Debug)]
pub struct NewFile {
    /// Whose it is; nobody else sees it.
    pub owner: String,
    /// What its owner calls it.
    pub name: String,
    /// What it is for.
    pub purpose: String,
    /// What is in it.
    pub text: String,
}

/// A file that is kept, without what is in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredFile {
    /// Unguessable; later ones sort behind earlier ones.
    pub id: String,
    /// What its owner calls it.
    pub name: String,
    /// What it is for.
    pub purpose: String,
    /// How long it is.
    pub bytes: i64,
    /// When it came, in microseconds.
    pub created_us: i64,
    /// When it is forgotten.
    pub expires_us: i64,
}

const FILE: &str = "id, name, purpose, bytes, created_us, expires_us";

impl StoredFile {
    fn read(row: &AnyRow) -> Result<StoredFile, sqlx::Error> {
        Ok(StoredFile {
            id: row.try_get("id")?,
            name: row.try_get("name")?,
            purpose: row.try_get("purpose")?,
            bytes: row.try_get("bytes")?,
            created_us: row.try_get("created_us")?,
            expires_us: row.try_get("expires_us")?,
        })
    }
}

/// Which of an owner's files or batches are listed.
#[derive(Clone, Copy, Debug)]
pub struct Page<'a> {
    /// Those behind this one.
    pub after: Option<&'a str>,
    /// The newest first.
    pub newest_first: bool,
    /// At most this many.
    pub most: i64,
}

impl Store {
    /// Keeps a file. When this returns it is on disk.
    pub async fn put_file(&self, file: NewFile) -> Result<StoredFile, Error> {
        let statement = "SELECT COUNT(*) AS count, CAST(COALESCE(SUM(bytes), 0) AS BIGINT) AS bytes FROM files \
             WHERE owner = $1";
        let mut change = self.inner.writer.begin().await?;
        let row = sqlx::query(statement).bind(&file.owner).fetch_one(&mut *change).await?;
        let count = u64::try_from(row.try_get::<i64, _>("count")?).unwrap_or(0);
        let bytes = u64::try_from(row.try_get::<i64, _>("bytes")?).unwrap_or(0);
        let (files_max, bytes_max) = self.file_bounds();
        if count >= files_max || bytes.saturating_add(file.text.len() as u64) > bytes_max {
            return Err(Error::FilesFull { files: files_max, bytes: bytes_max });
        }
        let mut writer = FileWriter::new(self.word("file-"));
        writer.write(&mut change, &file.text).await?;
        let stored = writer.close(self, &mut change, &file.owner, file.name, file.purpose).await?;
        change.commit().await?;
        Ok(stored)
    }

    /// An owner's file.
    pub async fn file(&self, owner: &str, id: &str) -> Result<Option<StoredFile>, Error> {
        let statement = format!("SELECT {FILE} FROM files WHERE owner = $1 AND id = $2");
        let row = sqlx::query(sqlx::AssertSqlSafe(statement)).bind(owner).bind(id);
        let row = row.fetch_optional(&self.inner.reader).await?;
        Ok(row.as_ref().map(StoredFile::read).transpose()?)
    }

    /// An owner's files, of one purpose if it is given.
    pub async fn files(
        &self,
        owner: &str,
        purpose: Option<&str>,
        page: Page<'_>,
    ) -> Result<Vec<StoredFile>, Error> {
        let (beyond, order) = page.sql();
        let statement = format!(
            "SELECT {FILE} FROM files WHERE owner = $1 AND ($2 = '' OR purpose = $2) AND ($3 = '' OR id {beyond} $3) \
             ORDER BY id {order} LIMIT $4"
        );
        let rows = sqlx::query(sqlx::AssertSqlSafe(statement)).bind(owner).bind(purpose.unwrap_or_default());
        let rows = rows.bind(page.after.unwrap_or_default()).bind(page.most);
        let rows = rows.fetch_all(&self.inner.reader).await?;
        Ok(rows.iter().map(StoredFile::read).collect::<Result<_, _>>()?)
    }

    /// A part of what is in a file, from 0 on; `None` behind the last.
    pub async fn file_part(&self, id: &str, n: i64) -> Result<Option<String>, Error> {
        let statement = "SELECT body FROM file_parts WHERE file_id = $1 AND n = $2";
        let row = sqlx::query(statement).bind(id).bind(n).fetch_optional(&self.inner.reader).await?;
        Ok(row.map(|row| row.try_get("body")).transpose()?)
    }

    /// All that is in a file.
    pub async fn file_text(&self, id: &str) -> Result<String, Error> {
        let mut text = String::new();
        let mut n = 0;
        while let Some(part) = self.file_part(id, n).await? {
            text.push_str(&part);
            n += 1;
        }
        Ok(text)
    }

    /// Forgets an owner's file; whether it was there.
    pub async fn delete_file(&self, owner: &str, id: &str) -> Result<bool, Error> {
        let mut change = self.inner.writer.begin().await?;
        let delete = sqlx::query("DELETE FROM files WHERE owner = $1 AND id = $2").bind(owner).bind(id);
        let was_there = delete.execute(&mut *change).await?.rows_affected() > 0;
        if was_there {
            forget_parts(&mut change, id).await?;
        }
        change.commit().await?;
        Ok(was_there)
    }

    /// Forgets files whose time is over.
    pub(crate) async fn sweep_files(&self) -> Result<(), Error> {
        let statement = "SELECT id FROM files WHERE expires_us < $1 LIMIT $2";
        let old = sqlx::query(statement).bind(self.inner.clock.now_us()).bind(SWEEP_MAX);
        for row in old.fetch_all(&self.inner.reader).await? {
            let id: String = row.try_get("id")?;
            let mut change = self.inner.writer.begin().await?;
            forget_parts(&mut change, &id).await?;
            sqlx::query("DELETE FROM files WHERE id = $1").bind(&id).execute(&mut *change).await?;
            change.commit().await?;
        }
        Ok(())
    }
}

async fn forget_parts(change: &mut Transaction<'_, Any>, id: &str) -> Result<(), Error> {
    sqlx::query("DELETE FROM file_parts WHERE file_id = $1").bind(id).execute(&mut **change).await?;
    Ok(())
}

impl Page<'_> {
    /// What compares an id with that of the page before, and the order.
    pub(crate) fn sql(&self) -> (&'static str, &'static str) {
        if self.newest_first { ("<", "DESC") } else { (">", "ASC") }
    }
}

/// A file that is being written, part by part, within one change of the database.
pub(crate) struct FileWriter {
    id: String,
    part: String,
    parts: i64,
    bytes: i64,
}

impl FileWriter {
    pub(crate) fn new(id: String) -> FileWriter {
        FileWriter { id, part: String::new(), parts: 0, bytes: 0 }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Adds text.
    pub(crate) async fn write(
        &mut self,
        change: &mut Transaction<'_, Any>,
        mut text: &str,
    ) -> Result<(), Error> {
        self.bytes += i64::try_from(text.len()).unwrap_or(i64::MAX);
        while self.part.len() + text.len() > PART_BYTES {
            let (front, rest) = text.split_at(text.floor_char_boundary(PART_BYTES - self.part.len()));
            self.part.push_str(front);
            text = rest;
            self.flush(change).await?;
        }
        self.part.push_str(text);
        Ok(())
    }

    async fn flush(&mut self, change: &mut Transaction<'_, Any>) -> Result<(), Error> {
        let part = mem::take(&mut self.part);
        let statement = "INSERT INTO file_parts (file_id, n, body) VALUES ($1, $2, $3)";
        let insert = sqlx::query(statement).bind(&self.id).bind(self.parts).bind(part);
        insert.execute(&mut **change).await?;
        self.parts += 1;
        Ok(())
    }

    /// Writes what is left, and that the file is there.
    pub(crate) async fn close(
        mut self,
        store: &Store,
        change: &mut Transaction<'_, Any>,
        owner: &str,
        name: String,
        purpose: String,
    ) -> Result<StoredFile, Error> {
        if !self.part.is_empty() {
            self.flush(change).await?;
        }
        let created_us = store.inner.clock.now_us();
        let expires_us = created_us.saturating_add(store.retention_us());
        let FileWriter { id, bytes, .. } = self;
        let statement = "INSERT INTO files (id, owner, name, purpose, bytes, created_us, expires_us) \
             VALUES ($1, $2, $3, $4, $5, $6, $7)";
        let insert = sqlx::query(statement).bind(&id).bind(owner).bind(&name).bind(&purpose);
        insert.bind(bytes).bind(created_us).bind(expires_us).execute(&mut **change).await?;
        Ok(StoredFile { id, name, purpose, bytes, created_us, expires_us })
    }
}
