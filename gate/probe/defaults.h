#pragma once

#include <string>

namespace gate {

// Writes every default of the tree to `path`, one a line with tabs between the fields:
//
//   field   NAME  VALUE                      of the structures of llama.h and of common_params; NAME says which and for
//                                            which program, before and after it has read an empty command line
//   option  PROGRAM  FLAGS  NAME  VALUE      of each option that a program knows; FLAGS are its names
//
// `model` is a name to give where a program insists on one. Throws std::runtime_error.
void write_defaults(const std::string & path, const std::string & model);

} // namespace gate
