//! Single modules against the reference, in f64.

mod common;

use biformer::autograd::{Tape, Var};
use biformer::model::{Attention, Block, Builder, Family, Mode, ModelConfig, Pass, PerStage, Result};
use biformer::tensor::DType;
use common::generator;
use common::golden::{assert_close, extents, l2, nchw, numbers};
use serde_json::Value;

const TOLERANCE: f64 = 1e-9;

/// The number behind a word of a module's description: "H4" for "H" gives 4.
fn number(description: &str, word: &str) -> usize {
    let digits = |rest: &str| rest.parse::<usize>().ok();
    let found = description.split([' ', ',']).find_map(|part| digits(part.strip_prefix(word)?));
    found.unwrap_or_else(|| panic!("no {word} in \"{description}\""))
}

enum Module {
    Attention(Attention),
    Block(Block),
}

impl Module {
    fn forward<'t>(&self, pass: &Pass<'t>, x: &Var<'t>) -> Result<Var<'t>> {
        match self {
            Module::Attention(attention) => attention.forward(pass, x.clone(), None),
            Module::Block(block) => block.forward(pass, x.clone()),
        }
    }
}

/// Builds a module, gives it generated weights, runs it, and compares.
fn check(description: &str, known: &Value, config: &ModelConfig, prefix: &str) {
    config.check().unwrap();
    let mut builder = Builder::new(0);
    let is_block = prefix == "block";
    let module = match is_block {
        true => Module::Block(Block::new(&mut builder, prefix, config, 0, 0.0)),
        false => Module::Attention(Attention::new(&mut builder, prefix, config, 0)),
    };
    let (mut parameters, statistics) = builder.build(DType::F64).unwrap();
    let layout = parameters.layout().clone();
    for id in layout.ids() {
        // The NCHW modules have the weights of the others under other names.
        let key = layout.name(id).replace("qkv_linear", "qkv.qkv").replace("output_linear", "wo");
        parameters.set(id, &generator::tensor(&key, layout.shape(id))).unwrap();
    }
    let shape = extents(&known["shape"]);
    let mut input = generator::tensor("input", &shape);
    if is_block {
        input = input.permute(&[0, 2, 3, 1]).unwrap().contiguous().unwrap();
    }
    let tape = Tape::inference();
    let pass = Pass::new(&tape, Mode::Evaluate, &parameters, &statistics);
    let output = module.forward(&pass, &tape.constant(input)).unwrap().into_value();
    let got = if is_block { nchw(&output) } else { output.to_vec::<f64>().unwrap() };

    assert_close(&format!("{description}, first values"), &got[..8], &numbers(&known["first8"]), TOLERANCE);
    assert_close(&format!("{description}, last values"), &got[got.len() - 4..], &numbers(&known["last4"]), TOLERANCE);
    let norm = known["l2"].as_f64().unwrap();
    assert_close(&format!("{description}, l2"), &[l2(&got)], &[norm], TOLERANCE);
    let sum: f64 = got.iter().sum();
    assert!((sum - known["sum"].as_f64().unwrap()).abs() <= TOLERANCE * norm, "{description}, sum {sum}");
    if let Some(routes) = known["idx"].as_array() {
        let wanted: Vec<u32> = routes.iter().flat_map(numbers).map(|x| x as u32).collect();
        assert_eq!(pass.into_trace().routes[0].indices.to_vec::<u32>().unwrap(), wanted, "{description}, routes");
    }
}

#[test]
fn every_module_vector() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/golden/modules.json");
    let modules: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let modules = modules.as_object().unwrap();
    assert!(modules.len() > 3, "{} modules", modules.len());
    for (description, known) in modules {
        let kind = description.split([' ', '(']).next().unwrap();
        assert_eq!(known["idx"].is_array(), kind == "legacy_bra", "{description}: whether its routes are known");
        let dim = number(description, "dim");
        let one_stage = ModelConfig {
            depth: vec![1],
            embed_dim: vec![dim],
            auto_pad: true,
            num_classes: 1,
            ..ModelConfig::default()
        };
        match kind {
            "legacy_bra" | "nchw_bra" => {
                let family = if kind == "nchw_bra" { Family::BiformerStlNchw } else { Family::Biformer };
                let config = ModelConfig {
                    family,
                    topks: vec![number(description, "topk") as i64],
                    n_win: PerStage::All(number(description, "n_win")),
                    head_dim: dim / number(description, "heads"),
                    ..one_stage
                };
                check(description, known, &config, "bra");
            }
            "AttentionLePE" | "Attention" => {
                let topk = if kind == "Attention" { -1 } else { -2 };
                let config =
                    ModelConfig { topks: vec![topk], full_attention_heads: number(description, "heads"), ..one_stage };
                check(description, known, &config, "lepeattn");
            }
            "Block" => {
                let topk = description.split(' ').find_map(|part| part.strip_prefix("topk")?.parse().ok()).unwrap();
                let head_dim = if topk > 0 { dim / number(description, "heads") } else { 32 };
                let config = ModelConfig { topks: vec![topk], head_dim, ..one_stage };
                check(description, known, &config, "block");
            }
            other => panic!("unknown kind of module {other}"),
        }
    }
}
