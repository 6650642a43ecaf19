# Adds the probe of "off means off" to the build of a llama.cpp tree, without a change to that tree:
# CMAKE_PROJECT_llama.cpp_INCLUDE names this file, so CMake reads it right after the tree's own project() call. The
# libraries do not exist yet at that moment, so the target is declared when the top-level file has been read to its end.
#
# EVAL: the arguments of a deferred call are expanded when it runs, and CMAKE_CURRENT_LIST_DIR is another folder then.
cmake_language(EVAL CODE "cmake_language(DEFER CALL include [[${CMAKE_CURRENT_LIST_DIR}/target.cmake]])")
