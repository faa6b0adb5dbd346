// Generation in node-llama-cpp, a turn at a time: node bench_node.mjs MODEL TOKENS THREADS N reads a prompt of TOKENS and
// prints its milliseconds, then for each line that it is sent the milliseconds of a token, mean of N (bench_hosts.py).
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";
import path from "node:path";

const [model, n_prompt, threads, n_turn] = process.argv.slice(2);
const TURNS = 100; // that a context has room for
const entry = path.join(process.cwd(), "node_modules", "node-llama-cpp", "dist", "index.js");
const { getLlama, LlamaLogLevel } = await import(pathToFileURL(entry).href);
const llama = await getLlama({ gpu: false, build: "never", logLevel: LlamaLogLevel.error, skipDownload: true });
const loaded = await llama.loadModel({ modelPath: model, gpuLayers: "max", defaultContextFlashAttention: true });
const size = { contextSize: Number(n_prompt) + TURNS * Number(n_turn), sequences: 1, flashAttention: true };
const context = await loaded.createContext({ ...size, threads: Number(threads) });
const text = "The cache holds the keys and the values of every token that was read. ";
const prompt = loaded.tokenize(text.repeat(1 + Number(n_prompt) / 8)).slice(0, Number(n_prompt));
const steps = context.getSequence().evaluate(prompt, { temperature: 0, yieldEogToken: true });

async function timed(n) {
    const start = performance.now();
    for (let i = 0; i < n; i++)
        if ((await steps.next()).done) throw new Error("the model ended its text: the rest cannot be timed");
    return (performance.now() - start) / n;
}

console.log(await timed(1)); // the first token comes with the prompt
for await (const _ of createInterface({ input: process.stdin })) console.log(await timed(Number(n_turn)));
process.exit(0);
