#pragma once

#include "report.h"

#include "ggml.h"
#include "llama.h"

#include <string>
#include <unordered_map>
#include <unordered_set>

struct llama_context;

namespace gate {

// Numbers the nodes of a graph in the order they are met, and describes each in one line of "name=value" fields:
//
//   op, name, type, ne (elements), nb (strides in bytes), flags, params (hex of op_params), view (of what, at which byte),
//   src0... (a node as "#NUMBER name", a leaf as "name type ne nb flags"), on (the backend)
class node_writer {
  public:
    void restart();
    std::string line(const ggml_tensor * node, const char * backend);
    int count() const { return count_; }

  private:
    std::string reference(const ggml_tensor * tensor) const;

    std::unordered_map<const ggml_tensor *, int> numbers_;
    int                                          count_ = 0;
};

// Writes down the graphs a context computes and the inputs it fills, as the scheduler announces them. It never asks for the
// value of a node, so that all nodes of a split are computed in one go, as without it.
class computed_graphs {
  public:
    explicit computed_graphs(report & out) : out_(out) {}

    // What is computed from here on belongs to `step`.
    void step(const std::string & step);

    static bool callback(ggml_tensor * node, bool ask, void * self);

  private:
    void announce(const ggml_tensor * node);
    void input(const ggml_tensor * tensor);

    report &                                out_;
    std::string                             step_;
    int                                     graph_ = -1; // number of the graph inside the step
    std::string                             first_;      // how the first node of the step's graphs looks
    node_writer                             writer_;
    std::unordered_set<const ggml_tensor *> inputs_;     // of this graph, written down already
};

// The graph that `ctx` reserves for a batch of this size, and where the scheduler puts its nodes.
void write_reserved_graph(report & out, llama_context * ctx, const std::string & step, uint32_t n_tokens, uint32_t n_seqs, uint32_t n_outputs);

// Into how many parts the scheduler has split the graph of the last batch.
int count_splits(llama_context * ctx);

} // namespace gate
