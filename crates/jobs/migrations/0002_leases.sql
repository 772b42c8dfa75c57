-- Whoever finishes names its lease: without this, every finish reads all that are worked on.
CREATE INDEX jobs_lease ON jobs (lease) WHERE lease IS NOT NULL;
