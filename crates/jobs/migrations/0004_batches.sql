-- Jobs that are requests of one of the server's own routes: which route, and for those of a file of requests (a batch of
-- OpenAI's API) in whose order and under which name their answers are written down.
ALTER TABLE jobs ADD COLUMN route TEXT;
ALTER TABLE jobs ADD COLUMN batch TEXT;
ALTER TABLE jobs ADD COLUMN line BIGINT;
ALTER TABLE jobs ADD COLUMN custom_id TEXT;
CREATE UNIQUE INDEX jobs_line ON jobs (batch, line) WHERE batch IS NOT NULL;
CREATE INDEX jobs_batch ON jobs (batch, state) WHERE batch IS NOT NULL;

-- Files that clients sent, and those that answers were written to. Their text is in parts, so that nobody holds all of it.
CREATE TABLE files (
    id TEXT NOT NULL PRIMARY KEY,
    owner TEXT NOT NULL,
    name TEXT NOT NULL,
    purpose TEXT NOT NULL,
    bytes BIGINT NOT NULL,
    created_us BIGINT NOT NULL,
    expires_us BIGINT NOT NULL
);
CREATE INDEX files_owner ON files (owner, id);
CREATE INDEX files_expiring ON files (expires_us);
CREATE TABLE file_parts (
    file_id TEXT NOT NULL,
    n BIGINT NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (file_id, n)
);

-- States: 0 in_progress, 1 cancelling, 2 completed, 3 failed, 4 expired, 5 cancelled.
CREATE TABLE batches (
    id TEXT NOT NULL PRIMARY KEY,
    owner TEXT NOT NULL,
    idempotency_key TEXT,
    fingerprint TEXT NOT NULL,
    route TEXT NOT NULL,
    input_file TEXT NOT NULL,
    completion_window TEXT NOT NULL,
    metadata TEXT NOT NULL,
    state BIGINT NOT NULL,
    -- What was wrong with the file, of one that failed.
    errors TEXT,
    requests BIGINT NOT NULL,
    -- Of those, once all have ended; until then they are counted.
    completed BIGINT,
    failed BIGINT,
    output_file TEXT,
    error_file TEXT,
    created_us BIGINT NOT NULL,
    expires_us BIGINT NOT NULL,
    cancelling_us BIGINT,
    ended_us BIGINT
);
CREATE INDEX batches_owner ON batches (owner, id);
CREATE INDEX batches_open ON batches (id) WHERE state < 2;
CREATE INDEX batches_ended ON batches (ended_us) WHERE ended_us IS NOT NULL;
CREATE UNIQUE INDEX batches_key ON batches (owner, idempotency_key) WHERE idempotency_key IS NOT NULL;
