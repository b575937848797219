"""The app's side: become a verb, refresh what a restore repeats, give idle memory back."""
