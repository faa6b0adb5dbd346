// One generation in node-llama-cpp: node bench_node.mjs MODEL TOKENS THREADS [N] prints milliseconds for the prompt and
// for each of N tokens behind it (bench_hosts.py calls this).
import { pathToFileURL } from "node:url";
import path from "node:path";

const [model, n_prompt, threads, n_predict = "32"] = process.argv.slice(2);
const entry = path.join(process.cwd(), "node_modules", "node-llama-cpp", "dist", "index.js");
const { getLlama, LlamaLogLevel } = await import(pathToFileURL(entry).href);
const llama = await getLlama({ gpu: false, build: "never", logLevel: LlamaLogLevel.error, skipDownload: true });
const loaded = await llama.loadModel({ modelPath: model, gpuLayers: "max", defaultContextFlashAttention: true });
const size = { contextSize: Number(n_prompt) + Number(n_predict) + 64, sequences: 1, flashAttention: true };
const context = await loaded.createContext({ ...size, threads: Number(threads) });
const sequence = context.getSequence();
const text = "The cache holds the keys and the values of every token that was read. ";
const tokens = loaded.tokenize(text.repeat(1 + Number(n_prompt) / 8)).slice(0, Number(n_prompt));

async function generate() {
    const times = [performance.now()];
    for await (const token of sequence.evaluate(tokens, { temperature: 0 })) {
        times.push(performance.now());
        if (times.length > Number(n_predict) + 1) break;
    }
    await sequence.clearHistory();
    const n = times.length - 2; // the first token comes with the prompt
    return { prompt: times[1] - times[0], token: (times[times.length - 1] - times[1]) / n };
}

await generate(); // first touch of memory
console.log(JSON.stringify(await generate()));
await llama.dispose();
