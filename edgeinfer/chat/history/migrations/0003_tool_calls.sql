-- The calls that an answer made, with their results; the answer after them is a turn of its own.
ALTER TABLE turn ADD COLUMN calls TEXT NOT NULL DEFAULT '[]';
