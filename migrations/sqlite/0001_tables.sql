-- The tables of ax. Instants are milliseconds since 1970-01-01 UTC; words are those of docs/run_states.md; run ids are
-- 16 bytes, `lower(hex(run_id))` is the run's trace id; JSON is text, kept byte for byte.

CREATE TABLE meta (
    one         INTEGER PRIMARY KEY DEFAULT 1 CHECK (one = 1),
    database_id BLOB NOT NULL
) STRICT;
INSERT INTO meta (database_id)
SELECT unhex(substr(h, 1, 12) || '4' || substr(h, 14, 3) || '8' || substr(h, 18)) FROM (SELECT hex(randomblob(16)) AS h);

CREATE TABLE task (
    task_id        TEXT NOT NULL PRIMARY KEY,
    definition     TEXT NOT NULL,
    version        INTEGER NOT NULL,
    rev            INTEGER NOT NULL,
    anchor_at      INTEGER NOT NULL,
    effective_at   INTEGER NOT NULL,
    delay_run_id   BLOB,
    created_at     INTEGER NOT NULL,
    updated_at     INTEGER NOT NULL,
    deleted_at     INTEGER,
    -- Taken out of the definition, for filters.
    executor_group TEXT NOT NULL,
    status         TEXT NOT NULL,
    name           TEXT NOT NULL,
    search         TEXT NOT NULL, -- id and name in lower case
    labels         TEXT NOT NULL  -- JSON array: `name` and `name=value` of each
) STRICT;
CREATE INDEX task_rev ON task (rev);
CREATE INDEX task_group ON task (executor_group, task_id) WHERE deleted_at IS NULL;

CREATE TABLE run (
    run_id              BLOB NOT NULL PRIMARY KEY,
    task_id             TEXT NOT NULL,
    kind                TEXT NOT NULL,
    flow_id             BLOB NOT NULL,
    trigger_at          INTEGER NOT NULL,
    publish_at          INTEGER NOT NULL,
    payload             TEXT,
    stretch_from        INTEGER,
    stretch_to          INTEGER,
    stretch_count       INTEGER,
    created_at          INTEGER NOT NULL,
    executor_group      TEXT NOT NULL,
    queue               TEXT NOT NULL,
    handler             TEXT NOT NULL,
    priority            INTEGER NOT NULL,
    profile             TEXT,
    state               TEXT NOT NULL,
    reason              TEXT,
    adopted             INTEGER NOT NULL,
    decision            TEXT,
    intent              TEXT,
    message_no          INTEGER NOT NULL,
    message_incarnation TEXT,
    message_seq         INTEGER,
    message_open        INTEGER,
    attempt_base        INTEGER NOT NULL,
    attempt             INTEGER NOT NULL,
    max_attempts        INTEGER NOT NULL,
    worker_id           TEXT,
    lateness_ms         INTEGER,
    published_at        INTEGER,
    started_at          INTEGER,
    finished_at         INTEGER,
    result              TEXT,
    -- Whether the leader still has to do with the row.
    live INTEGER NOT NULL GENERATED ALWAYS AS
        (state IN ('waiting', 'pending', 'triggered', 'running') OR coalesce(message_open, 0)) VIRTUAL,
    -- The state once it is final, else null.
    ended_as TEXT GENERATED ALWAYS AS
        (CASE WHEN state IN ('waiting', 'pending', 'triggered', 'running') THEN NULL ELSE state END) VIRTUAL
) STRICT;
CREATE INDEX run_trigger ON run (trigger_at, run_id);
CREATE INDEX run_task ON run (task_id, trigger_at, run_id);
CREATE INDEX run_group ON run (executor_group, trigger_at, run_id);
CREATE INDEX run_live ON run (adopted, publish_at) WHERE live;
CREATE INDEX run_success ON run (task_id, trigger_at, run_id) WHERE ended_as = 'succeeded';
CREATE INDEX run_unsuccessful ON run (ended_as, trigger_at, run_id) WHERE ended_as <> 'succeeded';

CREATE TABLE attempt (
    run_id      BLOB NOT NULL,
    attempt     INTEGER NOT NULL,
    outcome     TEXT,
    worker_id   TEXT,
    started_at  INTEGER,
    finished_at INTEGER,
    error       TEXT,
    PRIMARY KEY (run_id, attempt)
) STRICT, WITHOUT ROWID;

CREATE TABLE signal (
    incarnation TEXT NOT NULL,
    seq         INTEGER NOT NULL,
    kind        TEXT NOT NULL,
    deliveries  INTEGER NOT NULL,
    at          INTEGER NOT NULL,
    PRIMARY KEY (incarnation, seq, kind, deliveries)
) STRICT, WITHOUT ROWID;

CREATE TABLE shard (
    shard_id        INTEGER PRIMARY KEY,
    epoch           INTEGER NOT NULL,
    definitions_rev INTEGER NOT NULL,
    planned_until   INTEGER -- null until the first leader
) STRICT;
INSERT INTO shard (shard_id, epoch, definitions_rev) VALUES (0, 0, 0);

CREATE TABLE settled (
    shard_id    INTEGER PRIMARY KEY REFERENCES shard,
    events_seq  INTEGER NOT NULL,
    incarnation TEXT NOT NULL
) STRICT;
INSERT INTO settled (shard_id, events_seq, incarnation) VALUES (0, 0, '');

CREATE TABLE audit (
    id      INTEGER PRIMARY KEY,
    at      INTEGER NOT NULL,
    actor   TEXT NOT NULL,
    action  TEXT NOT NULL,
    subject TEXT NOT NULL,
    detail  TEXT NOT NULL
) STRICT;
CREATE INDEX audit_subject ON audit (subject, id);

CREATE TABLE command (
    id         BLOB NOT NULL PRIMARY KEY,
    kind       TEXT NOT NULL,
    subject    TEXT NOT NULL,
    body       TEXT NOT NULL,
    created_at INTEGER NOT NULL
) STRICT;
