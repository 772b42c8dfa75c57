// Runs ik_llama.cpp on a model file and prints what crates/model/examples/speed.rs prints of Fornax.
//
// speed MODEL THREADS
//
// Straight through its C interface: no server, no sampler, the largest logit is the next token. Twice, with its weights
// as the file has them and repacked while they are loaded (its -rtr): of each figure the better one is printed.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "llama.h"

static const int STREAMS = 8, CONTEXT = 1024;

static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static void stop(const char *what) {
    std::fprintf(stderr, "%s\n", what);
    std::exit(1);
}

static double resident_mib() {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);)
        if (line.rfind("VmRSS:", 0) == 0) return std::strtod(line.c_str() + 6, nullptr) / 1024;
    return 0;
}

struct Engine {
    llama_model *model;
    llama_context *context;
    llama_batch batch;
    int vocab;

    // Computes these tokens of the first sequences, each from `position` on; the next token of each.
    std::vector<std::vector<int>> step(int position, const std::vector<std::vector<int>> &tokens) {
        std::vector<int> ends;
        batch.n_tokens = 0;
        for (int stream = 0; stream < (int) tokens.size(); stream++) {
            for (int at = 0; at < (int) tokens[stream].size(); at++) {
                int place = batch.n_tokens++;
                batch.token[place] = tokens[stream][at];
                batch.pos[place] = position + at;
                batch.n_seq_id[place] = 1;
                batch.seq_id[place][0] = stream;
                batch.logits[place] = at + 1 == (int) tokens[stream].size();
            }
            ends.push_back(batch.n_tokens - 1);
        }
        if (llama_decode(context, batch) != 0) stop("llama_decode failed");
        std::vector<std::vector<int>> next;
        for (int end : ends) {
            const float *logits = llama_get_logits_ith(context, end);
            next.push_back({(int) (std::max_element(logits, logits + vocab) - logits)});
        }
        return next;
    }

    std::vector<std::vector<int>> prompt(int streams, int count) {
        llama_kv_cache_clear(context);
        std::vector<int> tokens;
        for (int i = 0; i < count; i++) tokens.push_back((int) (i * 7919LL % 32000));
        return step(0, std::vector<std::vector<int>>(streams, tokens));
    }

    // Tokens per second of all streams together.
    double decode(int streams, int count) {
        auto following = prompt(streams, 32);
        double start = now();
        for (int token = 0; token < count; token++) following = step(32 + token, following);
        return streams * count / (now() - start);
    }
};

struct Figures {
    double load, prefill, decode, streams, resident;
};

static Figures figures(const char *path, int threads, bool repack) {
    double start = now();
    llama_model_params how = llama_model_default_params();
    how.repack_tensors = repack;
    if (repack) how.use_mmap = false;
    Engine engine{};
    engine.model = llama_model_load_from_file(path, how);
    if (!engine.model) stop("the model cannot be loaded");
    llama_context_params params = llama_context_default_params();
    params.n_ctx = STREAMS * CONTEXT;
    params.n_seq_max = STREAMS;
    params.n_batch = params.n_ubatch = 512;
    params.n_threads = params.n_threads_batch = threads;
    engine.context = llama_init_from_model(engine.model, params);
    if (!engine.context) stop("no context");
    Figures figures{};
    figures.load = now() - start;
    engine.batch = llama_batch_init(512, 0, 1);
    engine.vocab = llama_n_vocab(engine.model);
    // Weights and caches are touched before anything counts.
    engine.decode(1, 8);
    start = now();
    engine.prompt(1, 512);
    figures.prefill = 512 / (now() - start);
    figures.decode = engine.decode(1, 64);
    figures.streams = engine.decode(STREAMS, 32);
    figures.resident = resident_mib();
    llama_batch_free(engine.batch);
    llama_free(engine.context);
    llama_free_model(engine.model);
    return figures;
}

int main(int count, char **arguments) {
    if (count != 3) stop("speed MODEL THREADS");
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    int threads = std::atoi(arguments[2]);
    Figures plain = figures(arguments[1], threads, false), repacked = figures(arguments[1], threads, true);
    std::string build = llama_print_system_info();
    std::replace(build.begin(), build.end(), '"', '\'');
    std::printf(
        "{\"load_s\": %.3f, \"prefill\": %.1f, \"decode\": %.1f, \"streams\": %.1f, \"resident_mib\": %.1f, \"build\": \"%s\"}\n",
        std::min(plain.load, repacked.load), std::max(plain.prefill, repacked.prefill),
        std::max(plain.decode, repacked.decode), std::max(plain.streams, repacked.streams),
        std::min(plain.resident, repacked.resident), build.c_str());
}
