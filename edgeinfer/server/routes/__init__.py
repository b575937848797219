"""The routes, a file a family. `operations.py` lists them all: the router and the OpenAPI document are
made from that list.
"""
