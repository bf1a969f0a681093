-- The tables of ax. Instants are milliseconds since 1970-01-01 UTC; words are those of docs/run_states.md.
-- JSON is of type json, not jsonb: it is kept byte for byte, so numbers keep every digit and \u0000 is allowed.
-- Ids are collated "C": lists are in the same order on every server and in every other store.

CREATE TABLE meta (
    one         boolean PRIMARY KEY DEFAULT true CHECK (one),
    database_id uuid NOT NULL
);
INSERT INTO meta (database_id) VALUES (gen_random_uuid());

CREATE TABLE task (
    task_id        text COLLATE "C" PRIMARY KEY,
    definition     json NOT NULL,
    version        bigint NOT NULL,
    rev            bigint NOT NULL,
    anchor_at      bigint NOT NULL,
    effective_at   bigint NOT NULL,
    delay_run_id   uuid,
    created_at     bigint NOT NULL,
    updated_at     bigint NOT NULL,
    deleted_at     bigint,
    -- Taken out of the definition, for filters.
    executor_group text COLLATE "C" NOT NULL,
    status         text COLLATE "C" NOT NULL,
    name           text NOT NULL,
    search         text COLLATE "C" NOT NULL, -- id and name in lower case
    labels         text[] COLLATE "C" NOT NULL -- `name` and `name=value` of each
);
CREATE INDEX task_rev ON task (rev);
CREATE INDEX task_group ON task (executor_group, task_id) WHERE deleted_at IS NULL;
CREATE INDEX task_labels ON task USING gin (labels) WITH (fastupdate = off) WHERE deleted_at IS NULL AND labels <> '{}';

CREATE TABLE run (
    run_id              uuid PRIMARY KEY,
    task_id             text COLLATE "C" NOT NULL,
    kind                text COLLATE "C" NOT NULL,
    flow_id             uuid NOT NULL,
    trigger_at          bigint NOT NULL,
    publish_at          bigint NOT NULL,
    payload             json,
    stretch_from        bigint,
    stretch_to          bigint,
    stretch_count       bigint,
    created_at          bigint NOT NULL,
    executor_group      text COLLATE "C" NOT NULL,
    queue               text COLLATE "C" NOT NULL,
    handler             text COLLATE "C" NOT NULL,
    priority            bigint NOT NULL,
    profile             text COLLATE "C",
    state               text COLLATE "C" NOT NULL,
    reason              text,
    adopted             boolean NOT NULL,
    decision            text COLLATE "C",
    intent              text COLLATE "C",
    message_no          bigint NOT NULL,
    message_incarnation text COLLATE "C",
    message_seq         bigint,
    message_open        boolean,
    attempt_base        bigint NOT NULL,
    attempt             bigint NOT NULL,
    max_attempts        bigint NOT NULL,
    worker_id           text,
    lateness_ms         bigint,
    published_at        bigint,
    started_at          bigint,
    finished_at         bigint,
    result              json,
    -- Whether the leader still has to do with the row. Partial indexes ask this and `ended_as` instead of `state`, so
    -- that pending → triggered → running touches no index (heap-only updates).
    live boolean NOT NULL GENERATED ALWAYS AS
        (state IN ('waiting', 'pending', 'triggered', 'running') OR coalesce(message_open, false)) STORED,
    -- The state once it is final, else null.
    ended_as text COLLATE "C" GENERATED ALWAYS AS
        (CASE WHEN state IN ('waiting', 'pending', 'triggered', 'running') THEN NULL ELSE state END) STORED
) PARTITION BY RANGE (run_id);

-- Run ids are ordered by time, so partitions of run_id are partitions of time.
CREATE TABLE run_default PARTITION OF run DEFAULT WITH (fillfactor = 80);

CREATE INDEX run_trigger ON run (trigger_at, run_id);
CREATE INDEX run_task ON run (task_id, trigger_at, run_id);
CREATE INDEX run_group ON run (executor_group, trigger_at, run_id);
CREATE INDEX run_live ON run (adopted, publish_at) WHERE live;
CREATE INDEX run_success ON run (task_id, trigger_at, run_id) WHERE ended_as = 'succeeded';
CREATE INDEX run_unsuccessful ON run (ended_as, trigger_at, run_id) WHERE ended_as <> 'succeeded';

CREATE TABLE attempt (
    run_id      uuid NOT NULL,
    attempt     bigint NOT NULL,
    outcome     text COLLATE "C",
    worker_id   text,
    started_at  bigint,
    finished_at bigint,
    error       text,
    PRIMARY KEY (run_id, attempt)
);

CREATE TABLE signal (
    incarnation text COLLATE "C" NOT NULL,
    seq         bigint NOT NULL,
    kind        text COLLATE "C" NOT NULL,
    deliveries  bigint NOT NULL,
    at          bigint NOT NULL,
    PRIMARY KEY (incarnation, seq, kind, deliveries)
);

CREATE TABLE shard (
    shard_id        bigint PRIMARY KEY,
    epoch           bigint NOT NULL,
    definitions_rev bigint NOT NULL,
    planned_until   bigint -- null until the first leader
) WITH (fillfactor = 10);
INSERT INTO shard (shard_id, epoch, definitions_rev) VALUES (0, 0, 0);

CREATE TABLE settled (
    shard_id    bigint PRIMARY KEY REFERENCES shard,
    events_seq  bigint NOT NULL,
    incarnation text COLLATE "C" NOT NULL
) WITH (fillfactor = 10);
INSERT INTO settled (shard_id, events_seq, incarnation) VALUES (0, 0, '');

CREATE TABLE audit (
    id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at      bigint NOT NULL,
    actor   text NOT NULL,
    action  text COLLATE "C" NOT NULL,
    subject text COLLATE "C" NOT NULL,
    detail  json NOT NULL
);
CREATE INDEX audit_subject ON audit (subject, id);

CREATE TABLE command (
    id         uuid PRIMARY KEY,
    kind       text COLLATE "C" NOT NULL,
    subject    text COLLATE "C" NOT NULL,
    body       json NOT NULL,
    created_at bigint NOT NULL
);
