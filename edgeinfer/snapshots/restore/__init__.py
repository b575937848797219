"""The process after the resume: new random seeds, the launch's environment, then the verb."""
