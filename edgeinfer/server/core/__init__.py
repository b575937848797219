"""What every dialect shares: exchanges, jobs, models on demand, problems, streaming."""
