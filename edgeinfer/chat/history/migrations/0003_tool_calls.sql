-- The calls that an answer made, with their results; the answer that uses the results is a separate turn.
ALTER TABLE turn ADD COLUMN calls TEXT NOT NULL DEFAULT '[]';
