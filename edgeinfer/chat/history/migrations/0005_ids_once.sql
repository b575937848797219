-- An id is never used for a second conversation, because permissions, links and cached blocks name it.
CREATE TABLE conversation_once (
    id            INTEGER PRIMARY KEY AUTOINCREMENT,
    title         TEXT    NOT NULL DEFAULT '',
    model         TEXT    NOT NULL DEFAULT '',
    system_prompt TEXT    NOT NULL DEFAULT '',
    sampling      TEXT    NOT NULL DEFAULT '{}',
    head_id       INTEGER,
    draft         TEXT    NOT NULL DEFAULT '',
    created_ms    INTEGER NOT NULL,
    updated_ms    INTEGER NOT NULL,
    deleted_ms    INTEGER,
    tools         INTEGER NOT NULL DEFAULT 0
);
INSERT INTO conversation_once SELECT
    id, title, model, system_prompt, sampling, head_id, draft, created_ms, updated_ms, deleted_ms, tools
FROM conversation;
DROP TABLE conversation;
ALTER TABLE conversation_once RENAME TO conversation;
CREATE INDEX conversation_by_time ON conversation (updated_ms DESC) WHERE deleted_ms IS NULL;
CREATE TRIGGER title_inserted AFTER INSERT ON conversation BEGIN
    INSERT INTO title_search (rowid, title) VALUES (new.id, new.title);
END;
CREATE TRIGGER title_deleted AFTER DELETE ON conversation BEGIN
    INSERT INTO title_search (title_search, rowid, title) VALUES ('delete', old.id, old.title);
END;
CREATE TRIGGER title_changed AFTER UPDATE OF title ON conversation BEGIN
    INSERT INTO title_search (title_search, rowid, title) VALUES ('delete', old.id, old.title);
    INSERT INTO title_search (rowid, title) VALUES (new.id, new.title);
END;
