#include "graph.h"

#include "ggml-backend.h"
#include "llama-context.h"
#include "llama-ext.h"

#include <stdexcept>

namespace gate {

static void append(std::string & text, const char * field, const int64_t * values) {
    text += field;
    for (int i = 0; i < GGML_MAX_DIMS; ++i) {
        text += i == 0 ? "" : ",";
        text += std::to_string(values[i]);
    }
}

static void append(std::string & text, const char * field, const size_t * values) {
    text += field;
    for (int i = 0; i < GGML_MAX_DIMS; ++i) {
        text += i == 0 ? "" : ",";
        text += std::to_string(values[i]);
    }
}

// The parameters of these are addresses of functions.
static bool has_addresses(ggml_op op) {
    return op == GGML_OP_MAP_CUSTOM1 || op == GGML_OP_MAP_CUSTOM2 || op == GGML_OP_MAP_CUSTOM3 || op == GGML_OP_CUSTOM;
}

void node_writer::restart() {
    numbers_.clear();
    count_ = 0;
}

// A leaf has no operation. Everything else has been met before whatever reads it, so a number found here is never one that a
// tensor of an earlier graph left behind at the same address.
std::string node_writer::reference(const ggml_tensor * tensor) const {
    std::string text;
    const auto  found = numbers_.find(tensor);
    if (tensor->op != GGML_OP_NONE && found != numbers_.end()) {
        text += "#" + std::to_string(found->second) + " " + tensor->name;
        return text;
    }
    text += tensor->name;
    text += " ";
    text += ggml_type_name(tensor->type);
    append(text, " ne ", tensor->ne);
    append(text, " nb ", tensor->nb);
    text += " flags " + std::to_string(tensor->flags);
    if (tensor->op != GGML_OP_NONE) {
        text += std::string(" op ") + ggml_op_name(tensor->op);
    }
    if (tensor->view_src != nullptr) {
        text += std::string(" view ") + tensor->view_src->name + " at " + std::to_string(tensor->view_offs);
    }
    return text;
}

std::string node_writer::line(const ggml_tensor * node, const char * backend) {
    std::string text = "op=";
    text += ggml_op_desc(node); // the operation, or which unary or gated one it is
    text += "\tname=";
    text += node->name;
    text += "\ttype=";
    text += ggml_type_name(node->type);
    append(text, "\tne=", node->ne);
    append(text, "\tnb=", node->nb);
    text += "\tflags=" + std::to_string(node->flags);
    text += "\tparams=";
    if (!has_addresses(node->op)) {
        size_t used = GGML_MAX_OP_PARAMS/sizeof(int32_t);
        while (used > 0 && node->op_params[used - 1] == 0) {
            --used;
        }
        text += hex_of(node->op_params, used*sizeof(int32_t));
    }
    text += "\tview=";
    if (node->view_src != nullptr) {
        text += reference(node->view_src) + " at " + std::to_string(node->view_offs);
    }
    for (int i = 0; i < GGML_MAX_SRC; ++i) {
        if (node->src[i] != nullptr) {
            text += "\tsrc" + std::to_string(i) + "=" + reference(node->src[i]);
        }
    }
    text += "\ton=";
    text += backend;

    numbers_[node] = count_++;
    return text;
}

void computed_graphs::step(const std::string & step) {
    step_  = step;
    graph_ = -1;
    first_.clear();
    writer_.restart();
    inputs_.clear();
}

bool computed_graphs::callback(ggml_tensor * node, bool ask, void * self) {
    if (ask) {
        static_cast<computed_graphs *>(self)->announce(node);
        return false;
    }
    return true;
}

void computed_graphs::announce(const ggml_tensor * node) {
    // Nobody tells where a graph begins; but all of one step begin alike.
    const std::string look = std::string(ggml_op_name(node->op)) + " " + node->name;
    if (graph_ < 0 || look == first_) {
        first_ = look;
        ++graph_;
        writer_.restart();
        inputs_.clear();
    }
    for (int i = 0; i < GGML_MAX_SRC; ++i) {
        if (node->src[i] != nullptr && node->src[i]->op == GGML_OP_NONE && (node->src[i]->flags & GGML_TENSOR_FLAG_INPUT)) {
            input(node->src[i]);
        }
    }
    const ggml_backend_buffer_t buffer = node->buffer != nullptr ? node->buffer : node->view_src != nullptr ? node->view_src->buffer : nullptr;
    const int                   number = writer_.count();
    out_.line(ASPECT_COMPUTED, "node\t" + step_ + "\t" + std::to_string(graph_) + "\t" + std::to_string(number) + "\t" +
              writer_.line(node, buffer != nullptr ? ggml_backend_buffer_name(buffer) : "none"));
}

void computed_graphs::input(const ggml_tensor * tensor) {
    if (!inputs_.insert(tensor).second) {
        return;
    }
    std::string text = "input\t" + step_ + "\t" + std::to_string(graph_) + "\t" + tensor->name + "\t" + ggml_type_name(tensor->type);
    append(text, "\t", tensor->ne);
    if (tensor->data != nullptr && tensor->buffer != nullptr && ggml_backend_buffer_is_host(tensor->buffer)) {
        out_.bytes(ASPECT_INPUTS, text, tensor->data, ggml_nbytes(tensor));
    } else {
        out_.line(ASPECT_INPUTS, text + "\tnot readable here");
    }
}

void write_reserved_graph(report & out, llama_context * ctx, const std::string & step, uint32_t n_tokens, uint32_t n_seqs, uint32_t n_outputs) {
    ggml_cgraph * graph = llama_graph_reserve(ctx, n_tokens, n_seqs, n_outputs);
    if (graph == nullptr) {
        throw std::runtime_error("the graph for " + step + " could not be reserved");
    }
    const ggml_backend_sched_t sched = ctx->get_sched();
    out.line(ASPECT_RESERVED, "graph\t" + step + "\t" + std::to_string(ggml_graph_n_nodes(graph)) + " nodes\t" +
             std::to_string(ggml_backend_sched_get_n_splits(sched)) + " splits");
    node_writer writer;
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        ggml_tensor *        node    = ggml_graph_node(graph, i);
        const ggml_backend_t backend = ggml_backend_sched_get_tensor_backend(sched, node);
        out.line(ASPECT_RESERVED, "node\t" + step + "\t0\t" + std::to_string(i) + "\t" + writer.line(node, backend != nullptr ? ggml_backend_name(backend) : "none"));
    }
}

int count_splits(llama_context * ctx) {
    return ggml_backend_sched_get_n_splits(ctx->get_sched());
}

} // namespace gate
