-- The revision of the definitions that the watermark was last moved on. What changed after it has not been planned up to
-- the watermark; a new leader does so, and plans nothing twice.
ALTER TABLE shard ADD COLUMN planned_rev bigint NOT NULL DEFAULT 0;
UPDATE shard SET planned_rev = definitions_rev;
