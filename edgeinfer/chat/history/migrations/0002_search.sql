-- Full-text search over turns and titles. A turn is indexed when it has ended, not while it grows.
CREATE VIRTUAL TABLE turn_search USING fts5 (
    content, content = 'turn', content_rowid = 'id', tokenize = 'unicode61 remove_diacritics 2'
);
CREATE VIRTUAL TABLE title_search USING fts5 (
    title, content = 'conversation', content_rowid = 'id', tokenize = 'unicode61 remove_diacritics 2'
);

INSERT INTO turn_search (rowid, content) SELECT id, content FROM turn WHERE status <> 'streaming';
INSERT INTO title_search (rowid, title) SELECT id, title FROM conversation;

CREATE TRIGGER turn_inserted AFTER INSERT ON turn WHEN new.status <> 'streaming' BEGIN
    INSERT INTO turn_search (rowid, content) VALUES (new.id, new.content);
END;
CREATE TRIGGER turn_deleted AFTER DELETE ON turn WHEN old.status <> 'streaming' BEGIN
    INSERT INTO turn_search (turn_search, rowid, content) VALUES ('delete', old.id, old.content);
END;
CREATE TRIGGER turn_unindexed BEFORE UPDATE OF content, status ON turn WHEN old.status <> 'streaming' BEGIN
    INSERT INTO turn_search (turn_search, rowid, content) VALUES ('delete', old.id, old.content);
END;
CREATE TRIGGER turn_indexed AFTER UPDATE OF content, status ON turn WHEN new.status <> 'streaming' BEGIN
    INSERT INTO turn_search (rowid, content) VALUES (new.id, new.content);
END;

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
