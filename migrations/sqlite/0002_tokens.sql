-- Who may ask over HTTP. Only the SHA-256 of a token is kept: it is 256 bits out of the system's random numbers, so no
-- list of likely ones can be tried, and a slow hash would add nothing.
CREATE TABLE token (
    hash       BLOB NOT NULL PRIMARY KEY,
    name       TEXT NOT NULL,
    role       TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER,
    revoked_at INTEGER
) STRICT;
CREATE UNIQUE INDEX token_name ON token (name) WHERE revoked_at IS NULL;
