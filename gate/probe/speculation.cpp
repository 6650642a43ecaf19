// Multi-token prediction: a second context that drafts, made and driven by the tree's own code (common/speculative.h) in
// the order in which its server does it.

#include "graph.h"
#include "workload.h"

#include "llama-ext.h"
#include "llama.h"
#include "speculative.h"

#include <algorithm>
#include <memory>
#include <stdexcept>

namespace gate {

namespace {

struct drafting {
    report &              out;
    computed_graphs &     graphs;
    const configuration & config;
    llama_context *       target;
    llama_context *       draft;
    common_speculative *  spec;

    // Decodes with the target and lets the drafter follow.
    void process(common_batch & batch, const std::string & step) const {
        graphs.step(step);
        decode(target, batch, step);
        write_logits(out, target, batch, step);
        write_hidden(batch, step);
        graphs.step(step + ", drafter");
        if (!common_speculative_process(spec, batch)) {
            throw std::runtime_error("the drafter cannot follow in " + step);
        }
    }

    // The hidden states that the target hands to the drafter, one row a token.
    void write_hidden(const common_batch & batch, const std::string & step) const {
        const size_t n_embd = llama_model_n_embd_out(llama_get_model(target));
        for (int i = 0; i < batch.size(); ++i) {
            const float * row = llama_get_embeddings_nextn_ith(target, i);
            out.bytes(ASPECT_DRAFTS, "hidden\t" + step + "\t" + std::to_string(batch.tokens[i].seq_id) + "\t" + std::to_string(batch.tokens[i].pos[0]) +
                      "\t" + std::to_string(batch.tokens[i].id), row, row != nullptr ? n_embd*sizeof(float) : 0);
        }
    }

    // As common_memory does, but a refusal is written down instead of ending the program.
    void remove(int seq, llama_pos begin, const std::string & step) const {
        const bool ours   = llama_memory_seq_rm(llama_get_memory(target), seq, begin, -1);
        const bool theirs = llama_memory_seq_rm(llama_get_memory(draft),  seq, begin, -1);
        out.line(ASPECT_DRAFTS, "remove\t" + step + "\t" + std::to_string(seq) + "\t" + std::to_string(begin) + "\t" + (ours ? "yes" : "no") + "\t" + (theirs ? "yes" : "no"));
    }
};

} // namespace

static std::string words(const llama_tokens & tokens) {
    std::string text;
    for (const llama_token token : tokens) {
        text += (text.empty() ? "" : " ") + std::to_string(token);
    }
    return text;
}

bool run_speculation(report & out, models & loaded, const settings & set, const configuration & config) {
    common_params params = params_of(set, config);
    params.speculative.types                  = { COMMON_SPECULATIVE_TYPE_DRAFT_MTP };
    params.speculative.draft.mparams.path     = set.drafter;
    params.speculative.draft.cache_type_k     = config.type_k;
    params.speculative.draft.cache_type_v     = config.type_v;

    llama_model * model = loaded.target(params);
    if (set.drafter.empty() && llama_model_n_layer_nextn(model) == 0) {
        return false;
    }
    const auto limits = common_speculative_get_output_limits(set.n_batch, config.n_seq, common_speculative_n_max(&params.speculative));
    computed_graphs graphs(out);
    params.n_outputs_max         = limits.total;
    params.n_outputs_max_per_seq = limits.per_seq;
    params.n_ctx                 = context_length(set, model)*config.n_seq;
    params.cb_eval               = computed_graphs::callback;
    params.cb_eval_user_data     = &graphs;

    graphs.step("start");
    llama_context_ptr target(llama_init_from_model(model, common_context_params_to_llama(params)));
    if (!target) {
        throw std::runtime_error("no context can be made");
    }
    graphs.step("start, drafter");
    common_params params_draft = common_base_params_to_speculative(params);
    const auto    made         = common_speculative_init_from_params(params_draft, model, target.get());
    if (made->context() == nullptr) {
        throw std::runtime_error("no drafting context can be made");
    }
    params.speculative.draft.ctx_tgt = target.get();
    params.speculative.draft.ctx_dft = made->context();
    const common_speculative_ptr spec(common_speculative_init(params.speculative, config.n_seq));
    if (!spec) {
        throw std::runtime_error("no drafter can be made");
    }

    const drafting            with{ out, graphs, config, target.get(), made->context(), spec.get() };
    common_batch              batch(target.get());
    std::vector<llama_tokens> prompts;
    std::vector<llama_token>  sampled; // in place of what a sampler would choose
    int                       n_steps = 0;
    for (int seq = 0; seq < config.n_seq; ++seq) {
        const int n = prompt_length(set, model, seq);
        prompts.push_back(made_up_tokens(llama_model_get_vocab(model), n + set.n_round, seq));
        for (int i = 0; i < n; ++i) {
            batch.add(prompts[seq][i], i, seq, i == n - 1);
            if (batch.size() == set.n_batch) {
                with.process(batch, "prompt " + std::to_string(n_steps++));
                batch.clear();
            }
        }
    }
    if (batch.size() > 0) {
        with.process(batch, "prompt " + std::to_string(n_steps++));
    }
    std::vector<llama_pos> next(config.n_seq);
    for (int seq = 0; seq < config.n_seq; ++seq) {
        next[seq] = prompt_length(set, model, seq);
        sampled.push_back(prompts[seq][next[seq]]);
    }

    std::vector<llama_tokens> texts;
    for (int seq = 0; seq < config.n_seq; ++seq) {
        texts.emplace_back(prompts[seq].begin(), prompts[seq].begin() + next[seq]);
        common_speculative_begin(spec.get(), seq, texts[seq]);
    }
    for (int round = 0; round < set.n_round; ++round) {
        const std::string         step = "round " + std::to_string(round);
        std::vector<llama_tokens> drafts(config.n_seq);
        for (int seq = 0; seq < config.n_seq; ++seq) {
            auto & wish   = common_speculative_get_draft_params(spec.get(), seq);
            wish          = common_speculative_draft_params();
            wish.drafting = true;
            wish.pos0     = next[seq];
            wish.id_last  = sampled[seq];
            wish.prompt   = &texts[seq];
            wish.result   = &drafts[seq];
        }
        graphs.step(step + ", drafting");
        common_speculative_draft(spec.get());

        batch.clear();
        for (int seq = 0; seq < config.n_seq; ++seq) {
            out.line(ASPECT_DRAFTS, "draft\t" + step + "\t" + std::to_string(seq) + "\t" + words(drafts[seq]));
            // what was drafted is decoded once more when the drafter follows the target
            llama_memory_seq_rm(llama_get_memory(made->context()), seq, next[seq], -1);
            batch.add(sampled[seq], next[seq], seq, true);
            for (size_t i = 0; i < drafts[seq].size(); ++i) {
                batch.add(drafts[seq][i], next[seq] + 1 + int(i), seq, true);
            }
        }
        with.process(batch, step + ", verifying");

        for (int seq = 0; seq < config.n_seq; ++seq) {
            // one is rejected at first, later none
            const int accepted = std::max(0, int(drafts[seq].size()) - (round == 0 ? 1 : 0));
            common_speculative_accept(spec.get(), seq, uint16_t(accepted));
            texts[seq].push_back(sampled[seq]);
            texts[seq].insert(texts[seq].end(), drafts[seq].begin(), drafts[seq].begin() + accepted);
            next[seq] += 1 + accepted;
            with.remove(seq, next[seq], step);
            sampled[seq] = prompts[seq][prompt_length(set, model, seq) + round];
        }
    }

    write_state(out, target.get(),    config.n_seq, "target");
    write_state(out, made->context(), config.n_seq, "drafter");
    write_memory(out, target.get(),    "target");
    write_memory(out, made->context(), "drafter");
    write_reserved(out, target.get(),    set, config.n_seq, "target, ");
    write_reserved(out, made->context(), set, config.n_seq, "drafter, ");
    return true;
}

} // namespace gate
