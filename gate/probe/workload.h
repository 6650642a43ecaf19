#pragma once

#include "report.h"

#include "common.h"
#include "ggml.h"
#include "llama-cpp.h"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace gate {

// What every configuration of a run shares. Sizes in tokens.
struct settings {
    std::string model;   // file of the model
    std::string drafter; // file of the model that drafts for it; empty: its own NextN layers
    int         n_ctx_seq   = 512;  // cells a sequence can count on; more where a prompt needs more
    int         n_batch     = 64;   // tokens of one call
    int         n_ubatch    = 32;   // tokens of one graph
    int         n_prompt    = 88;   // of the first sequence; a longer one leaves a sliding window behind
    int         max_window  = 1024; // a sliding window beyond this size is not filled
    int         n_decode    = 3;    // tokens decoded one at a time
    int         n_round     = 2;    // drafts made and verified
};

// One cell of the matrix, written as "fa=on,kv=split,k=q8_0,v=q8_0,seq=4,mtp=off,threads=1".
struct configuration {
    std::string           name;
    llama_flash_attn_type flash_attn = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    bool                  unified    = true;
    ggml_type             type_k     = GGML_TYPE_F16;
    ggml_type             type_v     = GGML_TYPE_F16;
    int                   n_seq      = 1;
    bool                  mtp        = false;
    int                   n_threads  = 1;

    // Throws std::invalid_argument.
    static configuration parse(const std::string & text);
};

// The models of a run, loaded when a configuration first needs them.
class models {
  public:
    explicit models(const settings & set) : set_(set) {}

    // Throws std::runtime_error when it cannot be loaded.
    llama_model * target(common_params & params);

  private:
    const settings &                set_;
    std::map<bool, llama_model_ptr> loaded_; // by whether the NextN layers are in it
};

// The parameters that the programs of the tree would use for this configuration.
common_params params_of(const settings & set, const configuration & config);

// The same tokens on every machine: nothing depends on what a model answers.
std::vector<llama_token> made_up_tokens(const llama_vocab * vocab, int n, uint32_t seed);

// Tokens of the prompt of sequence `seq`.
int prompt_length(const settings & set, const llama_model * model, int seq);

// Cells that a sequence gets.
int context_length(const settings & set, const llama_model * model);

// Decodes `batch` and throws std::runtime_error when that fails.
void decode(llama_context * ctx, common_batch & batch, const std::string & step);

// The logits of every output of `batch`, decoded just now.
void write_logits(report & out, llama_context * ctx, const common_batch & batch, const std::string & step);

// The state of all sequences together and of each.
void write_state(report & out, llama_context * ctx, int n_seq, const std::string & step);

void write_memory(report & out, llama_context * ctx, const std::string & what);

// Graphs of a full batch and of a decode, as at start.
void write_reserved(report & out, llama_context * ctx, const settings & set, int n_seq, const std::string & what);

// Runs a configuration and writes down everything of it. What the tree refuses ends up in the report as refused.
void run(report & out, models & loaded, const settings & set, const configuration & config);

// The part of `run` for a context with something that drafts. False: the model has nothing to draft with.
bool run_speculation(report & out, models & loaded, const settings & set, const configuration & config);

} // namespace gate
