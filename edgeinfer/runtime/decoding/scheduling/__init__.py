"""The step of the decode loop, by roles.

scheduler ── roster      who is inside, and how a request ends
          ├─ admission   who joins, and who waits for a place, for cells, or for a prefix
          ├─ prefixes    what a request takes over, from memory and store, and what it leaves behind
          ├─ planning    what goes into the next batch: tokens that decode, and guesses behind them
          ├─ prefill     ... and pieces of prompts; `chunks` says how large
          ├─ execution   one llama_decode, given up for newcomers where `interruptions` allow it
          ├─ harvest     what comes out: sampled tokens, progress, ends
          └─ idle_cells  memory of the cache that is given back when nobody has asked for a while
"""
