-- Answers that conversations go on from. An open one is being answered by the job of the same id.
CREATE TABLE responses (
    id TEXT NOT NULL PRIMARY KEY,
    owner TEXT NOT NULL,
    -- The one that it goes on from.
    previous TEXT,
    body TEXT NOT NULL,
    open BIGINT NOT NULL,
    -- Of its items, and of all of it.
    items_bytes BIGINT NOT NULL,
    bytes BIGINT NOT NULL,
    created_us BIGINT NOT NULL,
    expires_us BIGINT NOT NULL
);
CREATE INDEX responses_owner ON responses (owner, expires_us, bytes);
CREATE INDEX responses_expiring ON responses (expires_us);
CREATE INDEX responses_open ON responses (id) WHERE open = 1;
-- What was asked (said 0) and what was answered (said 1), in the order of the conversation.
CREATE TABLE response_items (
    response_id TEXT NOT NULL,
    n BIGINT NOT NULL,
    id TEXT NOT NULL,
    said BIGINT NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (response_id, n)
);
CREATE INDEX response_items_id ON response_items (id);
