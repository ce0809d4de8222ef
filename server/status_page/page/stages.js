// Where the time of a step goes: a bar for each stage.

import {element, keyed, setText} from './dom.js';
import {seconds} from './format.js';

export class Stages {
  constructor() {
    this.list = element('ul', {class: 'stages', tabindex: '0', 'aria-label': 'Mean time of each stage'});
    this.empty = element('p', {class: 'nothing', text: 'No step in the last 10 seconds.'});
    this.node = element('figure', {class: 'chart'}, element('figcaption', {}, element('h3', {text: 'Mean time of each stage'}),
      element('p', {class: 'facts', text: 'last 10 seconds'})), this.list, this.empty);
  }

  update(history) {
    const stages = (history.recent?.stages() ?? []).filter((stage) => stage.mean !== null);
    this.list.hidden = stages.length === 0;
    this.empty.hidden = stages.length > 0;
    const longest = Math.max(...stages.map((stage) => stage.mean), 0);
    const create = () => element('li', {}, element('span'), element('i', {'aria-hidden': 'true'}), element('b'));
    keyed(this.list, stages, (stage) => stage.stage, create, (node, stage) => {
      setText(node.children[0], stage.stage.replaceAll('_', ' '));
      node.children[1].style.setProperty('--share', `${longest > 0 ? stage.mean / longest * 100 : 0}%`);
      setText(node.children[2], seconds(stage.mean));
    });
  }
}
