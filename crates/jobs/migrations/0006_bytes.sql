-- Bytes of what a job asks, so that those of an owner can be summed. Jobs of before count for nothing.
ALTER TABLE jobs ADD COLUMN bytes BIGINT NOT NULL DEFAULT 0;
-- The sum is read from it alone.
CREATE INDEX jobs_bytes ON jobs (owner, bytes);
