-- How many items a batch has, so that whoever waits for it sees how far it is; NULL where it is no batch.
ALTER TABLE jobs ADD COLUMN items BIGINT;
