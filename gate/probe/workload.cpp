#include "workload.h"

#include "graph.h"

#include "ggml-backend.h"
#include "llama-context.h"
#include "llama-ext.h"
#include "llama.h"

#include <algorithm>
#include <map>
#include <stdexcept>

namespace gate {

//
// configurations
//

static ggml_type type_named(const std::string & name) {
    for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
        const char * known = ggml_type_name(ggml_type(i));
        if (known != nullptr && name == known) {
            return ggml_type(i);
        }
    }
    throw std::invalid_argument("there is no type '" + name + "'");
}

static int positive(const std::string & text) {
    const int value = std::stoi(text);
    if (value <= 0) {
        throw std::invalid_argument("'" + text + "' is not a positive number");
    }
    return value;
}

static bool either(const std::string & value, const char * yes, const char * no) {
    if (value != yes && value != no) {
        throw std::invalid_argument("'" + value + "' is neither " + yes + " nor " + no);
    }
    return value == yes;
}

configuration configuration::parse(const std::string & text) {
    configuration config;
    config.name = text;
    for (const std::string & field : string_split<std::string>(text, ',')) {
        const size_t equals = field.find('=');
        if (equals == std::string::npos) {
            throw std::invalid_argument("'" + field + "' is not NAME=VALUE");
        }
        const std::string name  = field.substr(0, equals);
        const std::string value = field.substr(equals + 1);
        if (name == "fa") {
            config.flash_attn = value == "auto" ? LLAMA_FLASH_ATTN_TYPE_AUTO :
                either(value, "on", "off") ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
        } else if (name == "kv") {
            config.unified = either(value, "unified", "split");
        } else if (name == "k") {
            config.type_k = type_named(value);
        } else if (name == "v") {
            config.type_v = type_named(value);
        } else if (name == "seq") {
            config.n_seq = positive(value);
        } else if (name == "mtp") {
            config.mtp = either(value, "on", "off");
        } else if (name == "threads") {
            config.n_threads = positive(value);
        } else {
            throw std::invalid_argument("a configuration has no '" + name + "'");
        }
    }
    return config;
}

common_params params_of(const settings & set, const configuration & config) {
    common_params params;
    params.model.path                = set.model;
    params.n_batch                   = set.n_batch;
    params.n_ubatch                  = set.n_ubatch;
    params.n_parallel                = config.n_seq;
    params.kv_unified                = config.unified;
    params.flash_attn_type           = config.flash_attn;
    params.cache_type_k              = config.type_k;
    params.cache_type_v              = config.type_v;
    params.cpuparams.n_threads       = config.n_threads;
    params.cpuparams_batch.n_threads = config.n_threads;
    params.fit_params                = false;
    params.warmup                    = false;
    return params;
}

//
// models and tokens
//

llama_model * models::target(common_params & params) {
    llama_model_params mparams = common_model_params_to_llama(params);
    llama_model_ptr &  model   = loaded_[mparams.load_mtp];
    if (!model) {
        model.reset(llama_model_load_from_file(set_.model.c_str(), mparams));
        if (!model) {
            throw std::runtime_error("the model cannot be loaded");
        }
    }
    return model.get();
}

std::vector<llama_token> made_up_tokens(const llama_vocab * vocab, int n, uint32_t seed) {
    const uint32_t           n_vocab = llama_vocab_n_tokens(vocab);
    uint64_t                 state   = 0x9e3779b97f4a7c15ull*(seed + 1);
    std::vector<llama_token> tokens;
    for (int i = 0; i < n; ++i) {
        state = state*6364136223846793005ull + 1442695040888963407ull; // Knuth's constants for a linear congruence modulo 2^64
        tokens.push_back(llama_token((state >> 33) % n_vocab));
    }
    return tokens;
}

int prompt_length(const settings & set, const llama_model * model, int seq) {
    const int window  = llama_model_n_swa(model);
    const int longest = window > 0 && window <= set.max_window ? std::max(set.n_prompt, window + set.n_ubatch + 8) : set.n_prompt;
    return seq == 0 ? longest : set.n_prompt/2 + 3*seq; // of different lengths, so that batches end inside sequences
}

int context_length(const settings & set, const llama_model * model) {
    return GGML_PAD(std::max(set.n_ctx_seq, prompt_length(set, model, 0) + 4*set.n_decode + 8*set.n_round + 8), 256);
}

//
// what is written down
//

void decode(llama_context * ctx, common_batch & batch, const std::string & step) {
    const int32_t code = llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, batch.get());
    if (code != 0) {
        throw std::runtime_error("decoding fails with " + std::to_string(code) + " in " + step);
    }
}

void write_logits(report & out, llama_context * ctx, const common_batch & batch, const std::string & step) {
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
    for (int i = 0; i < batch.size(); ++i) {
        const auto & token = batch.tokens[i];
        if (!token.output) {
            continue;
        }
        const float *     logits = llama_get_logits_ith(ctx, i);
        const std::string text   = "logits\t" + step + "\t" + std::to_string(token.seq_id) + "\t" + std::to_string(token.pos[0]) + "\t" + std::to_string(token.id);
        if (logits != nullptr) {
            out.bytes(ASPECT_LOGITS, text, logits, n_vocab*sizeof(float));
        } else {
            out.line(ASPECT_LOGITS, text + "\tnone");
        }
    }
    out.line(ASPECT_COMPUTED, "splits\t" + step + "\t" + std::to_string(count_splits(ctx)));
}

void write_state(report & out, llama_context * ctx, int n_seq, const std::string & step) {
    std::vector<uint8_t> blob(llama_state_get_size(ctx));
    size_t               size = llama_state_get_data(ctx, blob.data(), blob.size());
    out.bytes(ASPECT_STATE, "state\t" + step + "\tall", blob.data(), size);
    for (int seq = 0; seq < n_seq; ++seq) {
        blob.assign(llama_state_seq_get_size(ctx, seq), 0);
        size = llama_state_seq_get_data(ctx, blob.data(), blob.size(), seq);
        out.bytes(ASPECT_STATE, "state\t" + step + "\tsequence " + std::to_string(seq), blob.data(), size);
    }
}

void write_memory(report & out, llama_context * ctx, const std::string & what) {
    std::map<std::string, llama_memory_breakdown_data> parts; // by name: the order of addresses is none
    for (const auto & [type, part] : llama_get_memory_breakdown(ctx)) {
        auto & sum = parts[ggml_backend_buft_name(type)];
        sum.model   += part.model;
        sum.context += part.context;
        sum.compute += part.compute;
    }
    for (const auto & [name, part] : parts) {
        out.line(ASPECT_MEMORY, "memory\t" + what + "\t" + name + "\tmodel=" + std::to_string(part.model) +
                 "\tcontext=" + std::to_string(part.context) + "\tcompute=" + std::to_string(part.compute));
    }
}

void write_reserved(report & out, llama_context * ctx, const settings & set, int n_seq, const std::string & what) {
    write_reserved_graph(out, ctx, what + "prompt", set.n_ubatch, n_seq, set.n_ubatch);
    write_reserved_graph(out, ctx, what + "decode", n_seq,        n_seq, n_seq);
}

//
// the run without speculation
//

namespace {

// A context and what its sequences hold.
class conversation {
  public:
    conversation(report & out, computed_graphs & graphs, llama_context * ctx, const settings & set, const configuration & config) :
        out_(out), graphs_(graphs), ctx_(ctx), set_(set), config_(config), batch_(ctx) {
        const llama_model * model = llama_get_model(ctx);
        for (int seq = 0; seq < config.n_seq; ++seq) {
            tokens_.push_back(made_up_tokens(llama_model_get_vocab(model), context_length(set, model), seq));
            used_.push_back(0);
            pos_.push_back(0);
        }
    }

    // All prompts, in batches of several graphs. Every token of the first batch is an output, later only the last of a
    // sequence: the two ways to get the rows of the result.
    void prompts() {
        bool first = true;
        batch_.clear();
        for (int seq = 0; seq < config_.n_seq; ++seq) {
            const int n = prompt_length(set_, llama_get_model(ctx_), seq);
            for (int i = 0; i < n; ++i) {
                add(seq, first || i == n - 1);
                if (batch_.size() == set_.n_batch) {
                    compute("prompt");
                    first = false;
                }
            }
        }
        if (batch_.size() > 0) {
            compute("prompt");
        }
    }

    // One more token for each of these sequences.
    void next(const std::string & step, int begin, int end) {
        for (int seq = begin; seq < end; ++seq) {
            add(seq, true);
        }
        compute(step);
    }

    // A hole in the context of the first sequence, closed by moving what is behind it, as a context shift does.
    void shift() {
        const llama_memory_t memory  = llama_get_memory(ctx_);
        const bool           can     = llama_memory_can_shift(memory);
        const bool           removed = can && llama_memory_seq_rm(memory, 0, 8, 20);
        out_.line(ASPECT_STATE, std::string("shift\t") + (can ? "can" : "cannot") + "\t" + (removed ? "removed" : "not removed"));
        if (removed) {
            llama_memory_seq_add(memory, 0, 20, -1, -12);
            pos_[0] -= 12;
            next("shift", 0, config_.n_seq);
        }
    }

    // The last sequence becomes a copy of the first and goes on by itself.
    void copy() {
        const int            last   = config_.n_seq - 1;
        const llama_memory_t memory = llama_get_memory(ctx_);
        if (last == 0) {
            return;
        }
        llama_memory_seq_rm(memory, last, -1, -1);
        llama_memory_seq_cp(memory, 0, last, -1, -1);
        pos_[last] = pos_[0];
        next("copy", last, last + 1);
    }

    // The first sequence leaves and comes back from its blob.
    void restore() {
        std::vector<uint8_t> blob(llama_state_seq_get_size(ctx_, 0));
        const size_t         size = llama_state_seq_get_data(ctx_, blob.data(), blob.size(), 0);
        llama_memory_seq_rm(llama_get_memory(ctx_), 0, -1, -1);
        const size_t read = llama_state_seq_set_data(ctx_, blob.data(), size, 0);
        out_.line(ASPECT_STATE, "restore\t" + std::to_string(size) + "\t" + std::to_string(read));
        if (read > 0) {
            next("restore", 0, 1);
        }
    }

  private:
    void add(int seq, bool output) {
        batch_.add(tokens_[seq][used_[seq]++], pos_[seq]++, seq, output);
    }

    void compute(const std::string & kind) {
        const std::string step = kind + " " + std::to_string(steps_[kind]++);
        graphs_.step(step);
        decode(ctx_, batch_, step);
        write_logits(out_, ctx_, batch_, step);
        batch_.clear();
    }

    report &              out_;
    computed_graphs &     graphs_;
    llama_context *       ctx_;
    const settings &      set_;
    const configuration & config_;
    common_batch          batch_;

    std::vector<std::vector<llama_token>> tokens_; // of each sequence
    std::vector<int>                      used_;   // how many of them have gone into it
    std::vector<llama_pos>                pos_;    // position of its next token
    std::map<std::string, int>            steps_;
};

} // namespace

static void run_plain(report & out, models & loaded, const settings & set, const configuration & config) {
    common_params   params = params_of(set, config);
    llama_model *   model  = loaded.target(params);
    computed_graphs graphs(out);
    params.n_ctx             = context_length(set, model)*config.n_seq;
    params.cb_eval           = computed_graphs::callback;
    params.cb_eval_user_data = &graphs;

    graphs.step("start");
    llama_context_ptr ctx(llama_init_from_model(model, common_context_params_to_llama(params)));
    if (!ctx) {
        throw std::runtime_error("no context can be made");
    }
    conversation talk(out, graphs, ctx.get(), set, config);
    talk.prompts();
    for (int i = 0; i < set.n_decode; ++i) {
        talk.next("decode", 0, config.n_seq);
    }
    write_state(out, ctx.get(), config.n_seq, "after decode");
    talk.shift();
    talk.copy();
    talk.restore();
    write_state(out, ctx.get(), config.n_seq, "at the end");
    write_memory(out, ctx.get(), "context");
    write_reserved(out, ctx.get(), set, config.n_seq, "");
}

//
// refusals
//

namespace {

// Keeps the last errors of the libraries, which their functions do not return, and prints nothing else.
struct last_errors {
    std::string text;

    static void keep(ggml_log_level level, const char * text, void * self) {
        if (level == GGML_LOG_LEVEL_ERROR) {
            static_cast<last_errors *>(self)->text += text;
        }
    }
};

} // namespace

void run(report & out, models & loaded, const settings & set, const configuration & config) {
    last_errors errors;
    llama_log_set(last_errors::keep, &errors);
    out.begin(config.name);
    try {
        if (!config.mtp) {
            run_plain(out, loaded, set, config);
        } else if (!run_speculation(out, loaded, set, config)) {
            out.absent();
            llama_log_set(nullptr, nullptr);
            return;
        }
        out.finish();
    } catch (const std::exception & problem) {
        out.refuse(std::string(problem.what()) + ": " + errors.text);
    }
    llama_log_set(nullptr, nullptr);
}

} // namespace gate
