-- A conversation is a tree of turns; head_id is the last turn of the branch that is shown.
CREATE TABLE conversation (
    id            INTEGER PRIMARY KEY,
    title         TEXT    NOT NULL DEFAULT '',
    model         TEXT    NOT NULL DEFAULT '',
    system_prompt TEXT    NOT NULL DEFAULT '',
    sampling      TEXT    NOT NULL DEFAULT '{}',
    head_id       INTEGER,
    draft         TEXT    NOT NULL DEFAULT '',
    created_ms    INTEGER NOT NULL,
    updated_ms    INTEGER NOT NULL,
    deleted_ms    INTEGER
);
CREATE INDEX conversation_by_time ON conversation (updated_ms DESC) WHERE deleted_ms IS NULL;

CREATE TABLE turn (
    id              INTEGER PRIMARY KEY,
    conversation_id INTEGER NOT NULL REFERENCES conversation (id) ON DELETE CASCADE,
    parent_id       INTEGER REFERENCES turn (id) ON DELETE CASCADE,
    role            TEXT    NOT NULL CHECK (role IN ('user', 'assistant')),
    content         TEXT    NOT NULL DEFAULT '',
    reasoning       TEXT    NOT NULL DEFAULT '',
    attachments     TEXT    NOT NULL DEFAULT '[]',
    status          TEXT    NOT NULL,
    error           TEXT    NOT NULL DEFAULT '',
    model           TEXT    NOT NULL DEFAULT '',
    stats           TEXT    NOT NULL DEFAULT '{}',
    cut_summary     TEXT,
    created_ms      INTEGER NOT NULL
);
CREATE INDEX turn_of_conversation ON turn (conversation_id);
CREATE INDEX turn_of_parent ON turn (parent_id);

-- The pieces of an answer that is being generated; they are moved into the turn when the answer ends.
CREATE TABLE journal (
    id         INTEGER PRIMARY KEY,
    turn_id    INTEGER NOT NULL REFERENCES turn (id) ON DELETE CASCADE,
    content    TEXT    NOT NULL,
    reasoning  TEXT    NOT NULL,
    created_ms INTEGER NOT NULL
);
CREATE INDEX journal_of_turn ON journal (turn_id);
