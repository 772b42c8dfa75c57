-- Schemas are their owner's. Those that were registered before are nobody's: everybody finds them, and nobody changes them.
CREATE TABLE owned_schemas (
    model TEXT NOT NULL,
    owner TEXT NOT NULL,
    name TEXT NOT NULL,
    body TEXT NOT NULL,
    registered_us BIGINT NOT NULL,
    PRIMARY KEY (model, owner, name)
);
INSERT INTO owned_schemas (model, owner, name, body, registered_us)
    SELECT model, '', name, body, registered_us FROM schemas;
DROP TABLE schemas;
ALTER TABLE owned_schemas RENAME TO schemas;
-- Owners take turns: whose jobs wait, and which of an owner's is next.
CREATE INDEX jobs_owner ON jobs (model, owner, priority, created_us, id) WHERE state = 0;
