# The probe: one source, built identically against the pristine and the patched tree. PROJECT_SOURCE_DIR is that tree.
#
# fields.inc, beside the sources, is written by the toolkit from the headers of the pristine tree (gates/fields.py).

add_executable(opencoti-gate-probe
    ${CMAKE_CURRENT_LIST_DIR}/defaults.cpp
    ${CMAKE_CURRENT_LIST_DIR}/graph.cpp
    ${CMAKE_CURRENT_LIST_DIR}/main.cpp
    ${CMAKE_CURRENT_LIST_DIR}/report.cpp
    ${CMAKE_CURRENT_LIST_DIR}/sha256.cpp
    ${CMAKE_CURRENT_LIST_DIR}/speculation.cpp
    ${CMAKE_CURRENT_LIST_DIR}/workload.cpp
)

# llama-context.h: the scheduler of a context, which the public header does not give away
target_include_directories(opencoti-gate-probe PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/common)
target_link_libraries(opencoti-gate-probe PRIVATE llama-common llama ggml)
target_compile_features(opencoti-gate-probe PRIVATE cxx_std_17)
