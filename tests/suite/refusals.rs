//! Damaged, incomplete and foreign checkpoints: each is refused by name, before anything large.

use crate::run::{How, engine, open, run, run_from};
use k3_core::model::ForwardError;
use k3_core::view::TokenId;
use k3_platform::error::Error;
use k3_platform::index::Index;
use k3_platform::io::{Detour, Detoured, Disk, Faults, Faulty, Mode, ReadAt, Source};
use k3_platform::vocabulary::VocabularyFiles;
use k3_tests::{checkpoints, copy_dir, json};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use tempfile::TempDir;

/// A private copy of the project's own checkpoint.
struct Copy {
    _folder: TempDir,
    dir: PathBuf,
}

impl Copy {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let dir = folder.path().join("model");
        copy_dir(&checkpoints()[0], &dir);
        Self { _folder: folder, dir }
    }

    /// The shard that holds a tensor.
    fn shard_of(&self, tensor: &str) -> PathBuf {
        let index = json(&self.dir.join("model.safetensors.index.json"));
        self.dir.join(index["weight_map"][tensor].as_str().expect("a shard"))
    }

    fn edit_json(&self, file: &str, edit: impl FnOnce(&mut Value)) {
        let path = self.dir.join(file);
        let mut value = json(&path);
        edit(&mut value);
        fs::write(path, value.to_string()).expect("write");
    }

    /// Rewrites a shard's header; the data stay.
    fn edit_header(&self, shard: &Path, edit: impl FnOnce(&mut Value)) {
        let bytes = fs::read(shard).expect("read");
        let len = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().expect("8"))).expect("len");
        let mut header: Value = serde_json::from_slice(&bytes[8..8 + len]).expect("header");
        edit(&mut header);
        write_shard(shard, &header.to_string(), &bytes[8 + len..]);
    }

    fn refusal(&self) -> String {
        match open(&self.dir, Mode::Buffered) {
            Ok(_) => panic!("it was accepted"),
            Err(error) => error.to_string(),
        }
    }
}

fn write_shard(path: &Path, header: &str, data: &[u8]) {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(data);
    fs::write(path, bytes).expect("write");
}

const Q: &str = "language_model.model.layers.0.self_attn.q_proj.weight";
const K: &str = "language_model.model.layers.0.self_attn.k_proj.weight";
const DT: &str = "language_model.model.layers.0.self_attn.dt_bias";

fn refused(what: &str, parts: &[&str], damage: impl FnOnce(&Copy)) {
    let copy = Copy::new();
    damage(&copy);
    let message = copy.refusal();
    for part in parts {
        assert!(message.contains(part), "{what}: {message:?} does not name {part:?}");
    }
    println!("{what}: {message}");
}

#[test]
fn shards_that_lie() {
    refused("a shard is missing", &["missing", ".safetensors"], |c| fs::remove_file(c.shard_of(Q)).expect("remove"));
    refused("a shard one byte short", &["00001"], |c| {
        let path = c.shard_of(Q);
        let len = fs::metadata(&path).expect("metadata").len();
        fs::File::options().write(true).open(&path).expect("open").set_len(len - 1).expect("truncate");
    });
    refused("a shard one byte long", &["00001", "ends at"], |c| {
        let path = c.shard_of(Q);
        let len = fs::metadata(&path).expect("metadata").len();
        fs::File::options().write(true).open(&path).expect("open").set_len(len + 1).expect("extend");
    });
    for (what, lie) in [
        ("near 2^64", u64::MAX - 3),
        ("2^63", 1 << 63),
        ("zero", 0),
        ("file size - 7", u64::MAX),
        ("one more than there is", u64::MAX - 1),
    ] {
        refused(&format!("header length {what}"), &["00001"], |c| {
            let path = c.shard_of(Q);
            let mut bytes = fs::read(&path).expect("read");
            let real = u64::from_le_bytes(bytes[..8].try_into().expect("8"));
            let lie = match lie {
                u64::MAX => bytes.len() as u64 - 7,
                x if x == u64::MAX - 1 => real + 1,
                x => x,
            };
            bytes[..8].copy_from_slice(&lie.to_le_bytes());
            fs::write(path, bytes).expect("write");
        });
    }
    for len in [0, 1, 7, 8, 9] {
        refused(&format!("a shard of {len} bytes"), &["00001"], |c| {
            let path = c.shard_of(Q);
            let bytes = fs::read(&path).expect("read");
            fs::write(path, &bytes[..len]).expect("write");
        });
    }
    let offsets = |name: &'static str, change: fn(u64, u64) -> (u64, u64)| {
        move |c: &Copy| {
            let shard = c.shard_of(name);
            c.edit_header(&shard, |h| {
                let o = &h[name]["data_offsets"];
                let (b, e) = change(o[0].as_u64().expect("begin"), o[1].as_u64().expect("end"));
                h[name]["data_offsets"] = json!([b, e]);
            });
        }
    };
    refused("offsets reversed", &["00001"], offsets(Q, |b, e| (e, b)));
    refused("offsets against the shape", &["00001"], offsets(Q, |b, e| (b, e - 2)));
    refused("offsets beyond the file", &["00001"], offsets(Q, |b, e| (b + (1 << 40), e + (1 << 40))));
    refused("offsets near 2^64", &["00001"], offsets(Q, |b, e| (u64::MAX - (e - b), u64::MAX)));
    refused("overlapping tensors", &["share bytes"], |c| {
        let shard = c.shard_of(Q);
        c.edit_header(&shard, |h| h[Q]["data_offsets"] = h[K]["data_offsets"].clone());
    });
    refused("a BF16 tensor where F32 is due", &["dt_bias"], |c| {
        let shard = c.shard_of(DT);
        c.edit_header(&shard, |h| {
            h[DT]["dtype"] = json!("BF16");
            let n = h[DT]["shape"][0].as_u64().expect("n");
            h[DT]["shape"] = json!([n * 2]);
        });
    });
    refused("an unknown dtype", &["q_proj"], |c| {
        let shard = c.shard_of(Q);
        c.edit_header(&shard, |h| h[Q]["dtype"] = json!("F8_E4M3"));
    });
    refused("a type that clears the screen", &["q_proj", "\\u{1b}[2J"], |c| {
        let shard = c.shard_of(Q);
        c.edit_header(&shard, |h| h[Q]["dtype"] = json!("\u{1b}[2J"));
    });
    refused("another shape of the same size", &["q_proj"], |c| {
        let shard = c.shard_of(Q);
        c.edit_header(&shard, |h| {
            let (a, b) = (h[Q]["shape"][0].clone(), h[Q]["shape"][1].clone());
            h[Q]["shape"] = json!([b, a]);
        });
    });
    refused("the same tensor twice in a header", &["twice", "q_proj"], |c| {
        let shard = c.shard_of(Q);
        let bytes = fs::read(&shard).expect("read");
        let len = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().expect("8"))).expect("len");
        let header = String::from_utf8_lossy(&bytes[8..8 + len]).trim_end().to_owned();
        let value: Value = serde_json::from_str(&header).expect("header");
        let header = format!("{},\"{Q}\":{}}}", &header[..header.len() - 1], value[Q]);
        write_shard(&shard, &header, &bytes[8 + len..]);
    });
    refused("a tensor the index does not name", &["index does not say so"], |c| {
        c.edit_json("model.safetensors.index.json", |i| {
            let other = i["weight_map"]["language_model.lm_head.weight"].clone();
            i["weight_map"][Q] = other;
        });
    });
    refused("a tensor of no model", &["q_bias"], |c| {
        let shard = c.shard_of(Q);
        c.edit_header(&shard, |h| {
            let name = "language_model.model.layers.0.self_attn.q_bias";
            h[name] = h[Q].clone();
        });
    });
    refused("a header that is no JSON", &["00001", "byte"], |c| {
        let shard = c.shard_of(Q);
        let bytes = fs::read(&shard).expect("read");
        write_shard(&shard, "{\"a\": [1, 2", &bytes[8..]);
    });
}

/// A disk that counts how often each file is opened.
#[derive(Default)]
struct Opens(Disk, Mutex<BTreeMap<PathBuf, usize>>);

impl Source for Opens {
    fn open(&self, path: &Path) -> std::io::Result<Arc<dyn ReadAt>> {
        *self.1.lock().expect("no test panics here").entry(path.to_owned()).or_default() += 1;
        self.0.open_cached(path)
    }
}

/// The story: a shard was opened once to see whether it is there, and again for its header: 96 round trips
/// too many where the disk is at the other end of a network.
#[test]
fn each_shard_is_opened_once_whatever_is_wrong() {
    let cut = |shard: &Path| fs::write(shard, b"short").expect("cut");
    let whole = Copy::new();
    let shards = open(&whole.dir, Mode::Buffered).expect("open").index().shards().to_vec();
    let config = *open(&whole.dir, Mode::Buffered).expect("open").config();
    let opened = |copy: &Copy, examine: bool| {
        let source = Opens::default();
        let faults = if examine {
            Index::examine(&copy.dir, &source, &config).expect("an index").1
        } else {
            Index::open(&copy.dir, &source, &config).err().into_iter().collect()
        };
        let counts = source.1.into_inner().expect("no test panics here");
        for shard in &shards {
            let count = counts.get(&copy.dir.join(&shard.name)).copied().unwrap_or(0);
            assert_eq!(count, 1, "opens of {}, {faults:?}", shard.name);
        }
        faults
    };
    for examine in [false, true] {
        assert!(opened(&whole, examine).is_empty());
        // A header that is damaged does not hide what is missing behind it.
        let copy = Copy::new();
        let [first, .., middle, _, last] = &shards[..] else { panic!("few shards") };
        cut(&copy.dir.join(&first.name));
        fs::remove_file(copy.dir.join(&middle.name)).expect("remove");
        fs::remove_file(copy.dir.join(&last.name)).expect("remove");
        let faults = opened(&copy, examine);
        let Some(Error::MissingShard { path, count }) = faults.first() else { panic!("{faults:?}") };
        assert_eq!(*path, copy.dir.join(&middle.name));
        assert_eq!((*count, faults.len()), if examine { (1, 3) } else { (2, 1) });
        // Of several that are damaged it is the first one.
        let copy = Copy::new();
        cut(&copy.dir.join(&first.name));
        cut(&copy.dir.join(&last.name));
        let faults = opened(&copy, examine);
        assert!(matches!(&faults[0], Error::Header { path, .. } if path.ends_with(&first.name)), "{faults:?}");
        assert_eq!(faults.len(), if examine { 2 } else { 1 });
    }
}

#[test]
fn indexes_that_lie() {
    let index = "model.safetensors.index.json";
    refused("no index", &[index], |c| fs::remove_file(c.dir.join(index)).expect("remove"));
    refused("an empty index", &[index], |c| fs::write(c.dir.join(index), "").expect("write"));
    refused("an index without a map", &["weight_map"], |c| fs::write(c.dir.join(index), "{}").expect("write"));
    refused("an index that is an array", &["weight_map"], |c| fs::write(c.dir.join(index), "[]").expect("write"));
    refused("a truncated index", &["byte"], |c| {
        let bytes = fs::read(c.dir.join(index)).expect("read");
        fs::write(c.dir.join(index), &bytes[..bytes.len() / 2]).expect("write");
    });
    refused("a tensor missing from the index", &["1 tensors", Q], |c| {
        c.edit_json(index, |i| drop(i["weight_map"].as_object_mut().expect("map").remove(Q)));
    });
    refused("a tensor twice in the index", &["twice", Q], |c| {
        let text = fs::read_to_string(c.dir.join(index)).expect("read");
        let at = text.find("\"weight_map\"").expect("map");
        let brace = at + text[at..].find('{').expect("brace") + 1;
        let text = format!("{}\"{Q}\": \"model-00001-of-000012.safetensors\",{}", &text[..brace], &text[brace..]);
        fs::write(c.dir.join(index), text).expect("write");
    });
    for name in ["../model-00001-of-000012.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""] {
        refused("a shard outside the folder", &["plain file name"], |c| {
            c.edit_json(index, |i| i["weight_map"][Q] = json!(name));
        });
    }
    // What a terminal would obey is shown as it would be written.
    refused("a shard that clears the screen", &["plain file name", "\\u{1b}[2J"], |c| {
        c.edit_json(index, |i| i["weight_map"][Q] = json!("\u{1b}[2J.safetensors"));
    });
    refused("a tensor that clears the screen", &["not part of the model", "\\u{1b}[2J"], |c| {
        c.edit_json(index, |i| i["weight_map"]["vision_tower.\u{1b}[2J"] = json!("a.safetensors"));
    });
    refused("a file name that is a number", &["byte"], |c| c.edit_json(index, |i| i["weight_map"][Q] = json!(7)));
}

#[test]
fn configs_that_lie() {
    let config = "config.json";
    refused("every fault at once", &["hidden_size", "num_experts", "kv_lora_rank", "moe_renormalize"], |c| {
        c.edit_json(config, |v| {
            let text = v["text_config"].as_object_mut().expect("text_config");
            text.remove("hidden_size");
            text.insert("num_experts".to_owned(), json!(true));
            text.insert("kv_lora_rank".to_owned(), json!("512"));
            text.insert("moe_renormalize".to_owned(), json!(1));
        });
    });
    for (field, value) in [
        ("hidden_act", json!("silu")),
        ("mla_use_nope", json!(false)),
        ("mla_use_output_gate", json!(false)),
        ("latent_moe_use_norm", json!(false)),
        ("moe_layer_freq", json!(2)),
        ("num_expert_group", json!(2)),
        ("moe_router_activation_func", json!("softmax")),
        ("attn_res_block_size", json!(null)),
        ("activation_situ_linear_beta", json!(null)),
        ("hidden_size", json!(1u64 << 60)),
        ("num_experts_per_token", json!(0)),
    ] {
        refused("a field that is not supported", &[field], |c| {
            c.edit_json(config, |v| v["text_config"][field] = value);
        });
    }
    let map = |edit: fn(&mut Vec<Value>)| {
        move |c: &Copy| {
            c.edit_json(config, |v| {
                edit(v["text_config"]["linear_attn_config"]["full_attn_layers"].as_array_mut().expect("list"));
            });
        }
    };
    refused("a layer of no kind", &["layers"], map(|l| drop(l.pop())));
    refused("a layer of both kinds", &["layers"], map(|l| l.push(json!(1))));
    refused("a layer counted from zero", &["layers"], map(|l| l[0] = json!(0)));
    refused("no config", &[config], |c| fs::remove_file(c.dir.join(config)).expect("remove"));
    refused("a config of another width", &["expected dimension 1 to be 72"], |c| {
        c.edit_json(config, |v| v["text_config"]["hidden_size"] = json!(72));
    });
}

/// A config within all limits asks for four gigabytes of index; the files beside it have no room for
/// a fraction of the names.
#[test]
fn a_config_of_more_tensors_than_the_index_can_name_is_refused_before_any_memory() {
    let copy = Copy::new();
    copy.edit_json("config.json", |v| {
        let text = v["text_config"].as_object_mut().expect("text_config");
        text.insert("num_hidden_layers".to_owned(), json!(1024));
        text.insert("num_experts".to_owned(), json!(65_536));
        text["linear_attn_config"]["kda_layers"] = json!((1..1024).collect::<Vec<_>>());
        text["linear_attn_config"]["full_attn_layers"] = json!([1024]);
    });
    let before = peak_memory();
    let Err(error) = open(&copy.dir, Mode::Buffered) else { panic!("it was accepted") };
    let grown = peak_memory() - before;
    let Error::ShortIndex { path, len, tensors } = &error else { panic!("{error}") };
    assert_eq!(path, &copy.dir.join("model.safetensors.index.json"));
    assert_eq!(*len, fs::metadata(path).expect("metadata").len());
    assert!(*tensors > 1023 * 65_536 * 6, "{tensors}");
    assert!(error.to_string().contains(&tensors.to_string()), "{error}");
    // Other tests run in this process, but none of them needs a gigabyte.
    assert!(grown < 1 << 30, "{grown} bytes");
}

/// Blanks are valid in all these files, and reading them whole costs memory that no plan counts.
#[test]
fn padded_files_are_refused_before_they_are_read() {
    const MIB: usize = 1 << 20;
    let pad = |c: &Copy, file: &str, bytes: usize| {
        let path = c.dir.join(file);
        let mut text = fs::read(&path).expect("read");
        text.resize(bytes, b'\n');
        fs::write(path, text).expect("write");
    };
    let refusal = |c: &Copy| {
        let error =
            open(&c.dir, Mode::Buffered).and_then(|c| VocabularyFiles::open(&c).map(drop)).expect_err("refused");
        let Error::TooLong { path, len, most, .. } = &error else { panic!("{error}") };
        assert!(error.to_string().contains(&format!("{len} bytes")), "{error}");
        (path.clone(), *len, *most)
    };
    // 572 ids.
    for (file, most) in [("config.json", MIB), ("tokenizer_config.json", MIB), ("tiktoken.model", 64 + 160 * 572)] {
        let copy = Copy::new();
        pad(&copy, file, most + 1);
        assert_eq!(refusal(&copy), (copy.dir.join(file), most as u64 + 1, most as u64));
        pad(&copy, file, most);
        VocabularyFiles::open(&open(&copy.dir, Mode::Buffered).expect("open")).expect("as long as it may be");
    }
    let copy = Copy::new();
    let shard = copy.shard_of(Q);
    let bytes = fs::read(&shard).expect("read");
    let len = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().expect("8"))).expect("len");
    let header = std::str::from_utf8(&bytes[8..8 + len]).expect("text");
    let index = json(&copy.dir.join("model.safetensors.index.json"));
    let name = shard.file_name().and_then(|n| n.to_str()).expect("a name");
    let tensors = index["weight_map"].as_object().expect("map").values().filter(|&v| v == name).count();
    let most = (64 << 10) + 512 * tensors;
    let padded = |bytes: usize| format!("{header}{}", " ".repeat(bytes - header.len()));
    write_shard(&shard, &padded(most + 1), &bytes[8 + len..]);
    assert_eq!(refusal(&copy), (shard.clone(), most as u64 + 1, most as u64));
    write_shard(&shard, &padded(most), &bytes[8 + len..]);
    open(&copy.dir, Mode::Buffered).expect("as long as it may be");
}

/// The most memory that this process ever had (bytes).
fn peak_memory() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("status");
    let line = status.lines().find(|l| l.starts_with("VmHWM:")).expect("VmHWM");
    line.split_whitespace().nth(1).expect("a number").parse::<u64>().expect("a number") << 10
}

#[test]
fn requests_that_cannot_be() {
    let dir = &checkpoints()[0];
    let mut e = engine(open(dir, Mode::Direct).expect("open"), &How::default(), 4, 4).expect("an engine");
    let vocab = e.checkpoint().config().vocab_size;
    let mut logits = vec![0.0; vocab];
    let mut step = |ids: &[u32], n: usize| {
        let ids: Vec<_> = ids.iter().copied().map(TokenId).collect();
        match e.step(&ids, &mut logits[..n], &mut ()) {
            Ok(()) => "fine".to_owned(),
            Err(Error::Forward(inner)) => inner.to_string(),
            Err(other) => panic!("{other}"),
        }
    };
    let big = u32::try_from(vocab).expect("vocab");
    assert!(step(&[], 0).contains("no token ids"));
    assert!(step(&[1, big], 0).contains(&format!("{big}")));
    assert!(step(&[1], 3).contains("logits"));
    assert!(step(&[1, 2, 3, 4, 5], 0).contains('5'));
    // None of the refusals touched the sequence.
    assert_eq!(step(&[1, 2, 3, 4], vocab), "fine");
    assert!(step(&[1], 0).contains("context holds 4"));
}

/// One bf16 NaN in a norm: the run stops, says where, and samples nothing; the state is unusable
/// until it is reset.
#[test]
fn what_is_not_finite_is_never_sampled() {
    let copy = Copy::new();
    let name = "language_model.model.layers.4.post_attention_layernorm.weight";
    let shard = copy.shard_of(name);
    let mut bytes = fs::read(&shard).expect("read");
    let len = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().expect("8"))).expect("len");
    let header: Value = serde_json::from_slice(&bytes[8..8 + len]).expect("header");
    let at = 8 + len + usize::try_from(header[name]["data_offsets"][0].as_u64().expect("begin")).expect("begin");
    bytes[at..at + 2].copy_from_slice(&0x7fc0u16.to_le_bytes());
    fs::write(&shard, bytes).expect("write");
    let error = run(&copy.dir, &How::default(), &[TokenId(1), TokenId(2)], 3).expect_err("refused");
    let Error::Forward(inner) = &error else { panic!("{error}") };
    assert!(matches!(**inner, ForwardError::NonFinite { position: 0, .. }), "{error}");
    assert!(error.to_string().contains(name), "{error}");
}

/// The story: sigmoid, tanh and the caps turn an infinity into an ordinary number, so that one
/// infinite weight gave other tokens and no word about it. Every vector and every product is looked
/// at before such a function sees it.
#[test]
fn an_infinite_weight_is_found_wherever_it_is() {
    let prompt: Vec<_> = (1..9).map(TokenId).collect();
    let index = json(&checkpoints()[0].join("model.safetensors.index.json"));
    let mut kinds = std::collections::BTreeMap::new();
    for name in index["weight_map"].as_object().expect("map").keys() {
        let skipped = ["experts.0", "experts.1", "embed_tokens", "mm_projector", "vision_tower"];
        if name.contains(".experts.") || skipped.iter().any(|s| name.contains(s)) {
            continue;
        }
        let kind: String = name.split('.').filter(|part| part.parse::<u32>().is_err()).collect::<Vec<_>>().join(".");
        kinds.entry(kind).or_insert_with(|| name.clone());
    }
    assert!(kinds.len() > 35, "{kinds:?}");
    for name in kinds.values() {
        for negative in [false, true] {
            let copy = Copy::new();
            let shard = copy.shard_of(name);
            let mut bytes = fs::read(&shard).expect("read");
            let len = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().expect("8"))).expect("len");
            let header: Value = serde_json::from_slice(&bytes[8..8 + len]).expect("header");
            let at =
                usize::try_from(header[name]["data_offsets"][0].as_u64().expect("begin")).expect("begin") + 8 + len;
            let value = if negative { f32::NEG_INFINITY } else { f32::INFINITY }.to_le_bytes();
            if header[name]["dtype"] == "F32" {
                bytes[at..at + 4].copy_from_slice(&value);
            } else {
                bytes[at..at + 2].copy_from_slice(&value[2..]);
            }
            fs::write(&shard, bytes).expect("write");
            let error = run(&copy.dir, &How::default(), &prompt, 0).expect_err(name);
            let Error::Forward(inner) = &error else { panic!("{name}: {error}") };
            assert!(matches!(**inner, ForwardError::NonFinite { .. }), "{name}: {error}");
        }
    }
}

/// One scale byte of 255 silences its group of 32 weights, as if the scale were 0, and is reported.
#[test]
fn a_nan_scale_counts_as_nothing_and_is_named() {
    let copy = Copy::new();
    let prompt: Vec<_> = (1..9).map(TokenId).collect();
    let routed = run(&copy.dir, &How::default(), &prompt, 0).expect("a run").routed;
    let (layer, ids, _) = &routed[0];
    let (layer, expert) = (layer.0, ids[0].0);
    let name = format!("language_model.model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight_scale");
    let packed = name.replace("weight_scale", "weight_packed");
    let shard = copy.shard_of(&name);
    let original = fs::read(&shard).expect("read");
    let len = usize::try_from(u64::from_le_bytes(original[..8].try_into().expect("8"))).expect("len");
    let header: Value = serde_json::from_slice(&original[8..8 + len]).expect("header");
    let begin = |name: &str| {
        8 + len + usize::try_from(header[name]["data_offsets"][0].as_u64().expect("begin")).expect("begin")
    };
    let mut zeroed = original.clone();
    zeroed[begin(&packed)..begin(&packed) + 16].fill(0);
    fs::write(&shard, &zeroed).expect("write");
    let as_zero = run(&copy.dir, &How::default(), &prompt, 2).expect("a run");
    let mut damaged = original;
    damaged[begin(&name)] = 255;
    fs::write(&shard, &damaged).expect("write");
    let as_nan = run(&copy.dir, &How::default(), &prompt, 2).expect("a run");
    let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&as_zero.logits), bits(&as_nan.logits));
    let found: Vec<_> = as_nan.stats.expect("stats").experts.nan_scales.into_iter().collect();
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].0.0.0, found[0].0.1.0, found[0].1), (layer, expert, 1));
    assert!(as_zero.stats.expect("stats").experts.nan_scales.is_empty());
}

#[test]
fn reads_that_fail_stop_the_run_and_short_ones_do_not() {
    let dir = &checkpoints()[0];
    let prompt: Vec<_> = (1..6).map(TokenId).collect();
    let expected = run(dir, &How::default(), &prompt, 2).expect("a run");
    let faulty = |faults: Faults| Arc::new(Faulty::new(Disk::new(Mode::Buffered), faults));
    for seed in 0..4 {
        let source = faulty(Faults { seed, short: 3, interrupt: 3, ..Faults::default() });
        let out = run_from(source, dir, &How::default(), &prompt, 2).expect("short reads are no failure");
        assert_eq!(out.generated, expected.generated);
        assert!(out.logits.iter().zip(&expected.logits).all(|(a, b)| a.to_bits() == b.to_bits()));
    }
    let count = faulty(Faults::default());
    run_from(Arc::clone(&count) as _, dir, &How::default(), &prompt, 2).expect("a run");
    let reads = count.reads();
    assert!(reads > 50, "{reads} reads");
    for nth in (1..reads).step_by(usize::try_from(reads / 40).expect("reads").max(1)) {
        let source = faulty(Faults { fail_read: Some(nth), ..Faults::default() });
        let error = run_from(source, dir, &How::default(), &prompt, 2).expect_err("a read failed");
        assert!(matches!(error, Error::Read(_) | Error::Open { .. }), "read {nth}: {error}");
    }
}

/// Renames another file of the same length over a shard: every header and length still holds.
fn swap(shard: &Path) {
    let other = shard.with_extension("other");
    let mut bytes = fs::read(shard).expect("read");
    bytes.last_mut().into_iter().for_each(|b| *b ^= 1);
    fs::write(&other, bytes).expect("write");
    fs::rename(other, shard).expect("rename");
}

fn names_the_swapped(error: &Error, shard: &Path) {
    assert!(matches!(error, Error::Read(e) if e.path == shard), "{error}");
    assert!(error.to_string().contains("changed while in use"), "{error}");
}

#[test]
fn a_shard_swapped_after_opening_stops_the_run() {
    let prompt = [TokenId(1), TokenId(2)];
    for tensor in [Q, "language_model.model.embed_tokens.weight", "language_model.lm_head.weight"] {
        for mode in [Mode::Direct, Mode::Buffered] {
            let copy = Copy::new();
            let checkpoint = open(&copy.dir, mode).expect("open");
            let mut logits = vec![7.0; 2 * checkpoint.config().vocab_size];
            let shard = copy.shard_of(tensor);
            swap(&shard);
            let how = How { mode, ..How::default() };
            let result = engine(checkpoint, &how, 2, 4).and_then(|mut e| e.step(&prompt, &mut logits, &mut ()));
            names_the_swapped(&result.expect_err("refused"), &shard);
            assert!(logits.iter().all(|v| v.to_bits() == 7f32.to_bits()), "{tensor}: logits of a mixture");
        }
    }
}

/// The story: a shard that stayed open was written to, and what came out was of neither the one nor the
/// other.
#[test]
fn a_shard_written_to_while_it_is_open_stops_the_run() {
    use std::os::unix::fs::FileExt as _;
    let prompt = [TokenId(1), TokenId(2)];
    let copy = Copy::new();
    let checkpoint = open(&copy.dir, Mode::Direct).expect("open");
    let mut logits = vec![7.0; 2 * checkpoint.config().vocab_size];
    let mut engine = engine(checkpoint, &How::default(), 2, 8).expect("an engine");
    engine.step(&prompt, &mut logits, &mut ()).expect("a pass");
    let shard = copy.shard_of(Q);
    let file = fs::File::options().write(true).open(&shard).expect("open");
    let end = file.metadata().expect("metadata").len() - 1;
    file.write_all_at(&[0x5a], end).expect("write");
    // A clock of the file system may stand still between two writes.
    file.set_modified(std::time::SystemTime::now() + std::time::Duration::from_secs(1)).expect("a time");
    names_the_swapped(&engine.step(&prompt, &mut logits, &mut ()).expect_err("refused"), &shard);
}

/// A source with one descriptor, which swaps a shard before the open of a given number.
struct Scarce {
    disk: Disk,
    open: Arc<AtomicUsize>,
    opened: AtomicUsize,
    swap_at: usize,
    shard: PathBuf,
}

/// The one descriptor, until its file is closed.
struct Held(Arc<AtomicUsize>);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Detour for Held {
    fn read_at(&self, file: &Arc<dyn ReadAt>, buf: &mut [u8], offset: u64) -> std::io::Result<usize> {
        file.read_at(buf, offset)
    }
}

impl Source for Scarce {
    fn open(&self, path: &Path) -> std::io::Result<Arc<dyn ReadAt>> {
        let held = Detoured::new(self.disk.open(path)?, Held(Arc::clone(&self.open)));
        if self.open.fetch_add(1, Ordering::SeqCst) > 0 {
            // What a process out of descriptors is told.
            return Err(std::io::Error::from_raw_os_error(24));
        }
        if self.opened.fetch_add(1, Ordering::SeqCst) == self.swap_at {
            drop(held);
            swap(&self.shard);
            return self.open(path);
        }
        Ok(Arc::new(held))
    }

    fn open_cached(&self, path: &Path) -> std::io::Result<Arc<dyn ReadAt>> {
        self.disk.open_cached(path)
    }
}

#[test]
fn a_shard_swapped_while_it_was_closed_stops_the_run() {
    let prompt: Vec<_> = (1..5).map(TokenId).collect();
    let source = |copy: &Copy, swap_at| {
        let (open, opened) = (Arc::default(), AtomicUsize::new(0));
        Arc::new(Scarce { disk: Disk::new(Mode::Buffered), open, opened, swap_at, shard: copy.shard_of(Q) })
    };
    // The least memory, so that layers are read again for each token.
    let copy = Copy::new();
    let floor = match engine(open(&copy.dir, Mode::Direct).expect("open"), &How { budget: 0, ..How::default() }, 4, 7) {
        Err(Error::Budget(refusal)) => refusal.floor,
        other => panic!("a budget of nothing was not refused: {other:?}"),
    };
    let how = How { budget: floor, ..How::default() };
    let whole = source(&copy, usize::MAX);
    run_from(Arc::clone(&whole) as _, &copy.dir, &how, &prompt, 3).expect("one descriptor is enough");
    let opened = whole.opened.load(Ordering::SeqCst);
    assert!(opened > 60, "{opened} opens");
    for swap_at in [0, 1, opened / 4, opened / 2] {
        let copy = Copy::new();
        let error = run_from(source(&copy, swap_at), &copy.dir, &how, &prompt, 3).expect_err("swapped");
        names_the_swapped(&error, &copy.shard_of(Q));
    }
}
