-- One text for both databases: only BIGINT and TEXT, no generated numbers. Times are microseconds since 1970.
-- States: 0 IN_QUEUE, 1 IN_PROGRESS, 2 COMPLETED, 3 FAILED, 4 CANCELLED, 5 TIMED_OUT.
CREATE TABLE jobs (
    id TEXT NOT NULL PRIMARY KEY,
    model TEXT NOT NULL,
    -- Whose Idempotency-Key it is.
    owner TEXT NOT NULL,
    idempotency_key TEXT,
    -- Of what was submitted under that key.
    fingerprint TEXT NOT NULL,
    state BIGINT NOT NULL,
    priority BIGINT NOT NULL,
    input TEXT NOT NULL,
    webhook TEXT,
    ttl_ms BIGINT,
    execution_timeout_ms BIGINT,
    created_us BIGINT NOT NULL,
    -- Not taken before; moved by the pause after a failed attempt.
    not_before_us BIGINT NOT NULL,
    expires_us BIGINT NOT NULL,
    started_us BIGINT,
    finished_us BIGINT,
    execution_us BIGINT NOT NULL,
    attempts BIGINT NOT NULL,
    retries BIGINT NOT NULL,
    -- Who works on it. A completion names its lease and changes nothing once the lease is another's.
    lease TEXT,
    worker TEXT,
    beat BIGINT NOT NULL,
    -- Chunks handed out by the polling form of the stream.
    streamed BIGINT NOT NULL,
    output TEXT
);
CREATE INDEX jobs_queue ON jobs (model, priority, created_us, id) WHERE state = 0;
CREATE INDEX jobs_expiring ON jobs (expires_us) WHERE state = 0;
CREATE INDEX jobs_running ON jobs (worker) WHERE state = 1;
CREATE INDEX jobs_state ON jobs (model, state);
CREATE INDEX jobs_retried ON jobs (model) WHERE attempts + retries > 1;
CREATE INDEX jobs_finished ON jobs (finished_us) WHERE finished_us IS NOT NULL;
CREATE INDEX jobs_newest ON jobs (created_us);
CREATE UNIQUE INDEX jobs_key ON jobs (model, owner, idempotency_key) WHERE idempotency_key IS NOT NULL;

-- What became of a job, step by step.
CREATE TABLE events (
    job_id TEXT NOT NULL,
    at_us BIGINT NOT NULL,
    event TEXT NOT NULL,
    attempt BIGINT NOT NULL,
    detail TEXT
);
CREATE INDEX events_job ON events (job_id, at_us);

-- Parts of a result: texts of the attempt under way (item 0), or finished items of a batch (item 1), which later attempts keep.
CREATE TABLE chunks (
    job_id TEXT NOT NULL,
    n BIGINT NOT NULL,
    item BIGINT NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (job_id, n)
);

-- Webhooks on their way: 0 waiting, 1 delivered, 2 given up.
CREATE TABLE outbox (
    id TEXT NOT NULL PRIMARY KEY,
    job_id TEXT NOT NULL,
    url TEXT NOT NULL,
    body TEXT NOT NULL,
    state BIGINT NOT NULL,
    attempts BIGINT NOT NULL,
    next_us BIGINT NOT NULL
);
CREATE INDEX outbox_due ON outbox (next_us) WHERE state = 0;
CREATE INDEX outbox_job ON outbox (job_id);

CREATE TABLE schemas (
    model TEXT NOT NULL,
    name TEXT NOT NULL,
    body TEXT NOT NULL,
    registered_us BIGINT NOT NULL,
    PRIMARY KEY (model, name)
);
