// Compiled into every library here: a digest of its sources, compiler and llama.cpp version, made by build.sh.
extern "C" const char *edgeinfer_version() { return EDGEINFER_VERSION; }
