"""The launcher's side: start an app, supervise it, stand in for it at the terminal. Standard library
only.
"""
