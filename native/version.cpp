// Compiled into every library here: a digest of what it was made from, which build.sh knows.
extern "C" const char *edgeinfer_version() { return EDGEINFER_VERSION; }
