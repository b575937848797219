-- Whether the page offers tools to the model in this conversation.
ALTER TABLE conversation ADD COLUMN tools INTEGER NOT NULL DEFAULT 0;
