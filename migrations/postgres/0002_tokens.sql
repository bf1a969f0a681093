-- Who may ask over HTTP. Only the SHA-256 of a token is kept: it is 256 bits out of the system's random numbers, so no
-- list of likely ones can be tried, and a slow hash would add nothing.
CREATE TABLE token (
    hash       bytea PRIMARY KEY,
    name       text COLLATE "C" NOT NULL,
    role       text COLLATE "C" NOT NULL,
    created_at bigint NOT NULL,
    expires_at bigint,
    revoked_at bigint
);
CREATE UNIQUE INDEX token_name ON token (name) WHERE revoked_at IS NULL;
